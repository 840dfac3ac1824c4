// SPDX-License-Identifier: Apache-2.0
// vec<T, N>: constructed from any mix of parts, converted to other element types only explicitly.
#pragma once

#include "types.h"

namespace metal {

template <typename T, int N>
struct vec;

namespace detail {

// The compiler's vector type holds the value, so that loads, stores and arithmetic are single
// operations. It packs bool into bits and knows no bfloat class, hence the stand-ins.
template <typename T>
struct stored {
  typedef T type;
};
template <>
struct stored<bool> {
  typedef uint8_t type;
};
template <>
struct stored<bfloat> {
  typedef uint16_t type;
};
template <typename T, int N>
using native = typename stored<T>::type __attribute__((ext_vector_type(N)));

template <typename T>
inline constexpr bool computes_natively = !__is_same(T, bool) && !__is_same(T, bfloat);

/// `v.zx` and the like, for reading and, without repeated letters, for writing. V, its value
/// type, is an argument so that the operators of V are found for it.
template <typename V, typename T, int N, int... I>
struct swizzle {
  native<T, N> parent;

  METAL_CPU_INLINE const T& at(int i) const { return reinterpret_cast<const T*>(this)[i]; }
  METAL_CPU_INLINE T& at(int i) { return reinterpret_cast<T*>(this)[i]; }

  METAL_CPU_INLINE operator V() const { return V(at(I)...); }
  // By value: `v.zyx = v` reads everything before it writes.
  METAL_CPU_INLINE swizzle& operator=(V v) {
    int i = 0;
    ((at(I) = v[i++]), ...);
    return *this;
  }
  METAL_CPU_INLINE swizzle& operator=(const swizzle& v) { return *this = V(v); }
  METAL_CPU_INLINE swizzle& operator+=(const V& v) { return *this = V(*this) + v; }
  METAL_CPU_INLINE swizzle& operator-=(const V& v) { return *this = V(*this) - v; }
  METAL_CPU_INLINE swizzle& operator*=(const V& v) { return *this = V(*this) * v; }
  METAL_CPU_INLINE swizzle& operator/=(const V& v) { return *this = V(*this) / v; }
  METAL_CPU_INLINE T operator[](int i) const { return V(*this)[i]; }
};

template <typename T>
struct is_vec {
  static constexpr int size = 0;  // a scalar
  typedef T type;
  typedef T element;
};
template <typename T, int N>
struct is_vec<vec<T, N>> {
  static constexpr int size = N;
  typedef T element;
  typedef vec<T, N> type;
};
template <typename V, typename T, int N, int... I>
struct is_vec<swizzle<V, T, N, I...>> {
  static constexpr int size = sizeof...(I);
  typedef T element;
  typedef V type;
};
template <typename T>
inline constexpr int parts = is_vec<T>::size ? is_vec<T>::size : 1;

template <typename T, typename A>
METAL_CPU_INLINE void append(T* to, int& i, const A& a) {
  if constexpr (is_vec<A>::size == 0) {
    to[i++] = T(a);
  } else {
    const typename is_vec<A>::type v = a;
    for (int k = 0; k < is_vec<A>::size; ++k) to[i++] = T(v[k]);
  }
}

#define METAL_CPU_S2(a, b, i, j) swizzle<vec<T, 2>, T, N, i, j> a##b;
#define METAL_CPU_S3(a, b, c, i, j, k) swizzle<vec<T, 3>, T, N, i, j, k> a##b##c;
#define METAL_CPU_S4(a, b, c, d, i, j, k, l) swizzle<vec<T, 4>, T, N, i, j, k, l> a##b##c##d;
#define METAL_CPU_PAIRS2 \
  METAL_CPU_S2(x, x, 0, 0) METAL_CPU_S2(x, y, 0, 1) METAL_CPU_S2(y, x, 1, 0) METAL_CPU_S2(y, y, 1, 1)
#define METAL_CPU_PAIRS3                                                                 \
  METAL_CPU_PAIRS2 METAL_CPU_S2(x, z, 0, 2) METAL_CPU_S2(y, z, 1, 2) METAL_CPU_S2(z, x, 2, 0) \
      METAL_CPU_S2(z, y, 2, 1) METAL_CPU_S2(z, z, 2, 2)
#define METAL_CPU_PAIRS4                                                                 \
  METAL_CPU_PAIRS3 METAL_CPU_S2(x, w, 0, 3) METAL_CPU_S2(y, w, 1, 3) METAL_CPU_S2(z, w, 2, 3) \
      METAL_CPU_S2(w, x, 3, 0) METAL_CPU_S2(w, y, 3, 1) METAL_CPU_S2(w, z, 3, 2)         \
          METAL_CPU_S2(w, w, 3, 3)
#define METAL_CPU_TRIPLES3                                             \
  METAL_CPU_S3(x, y, z, 0, 1, 2) METAL_CPU_S3(x, z, y, 0, 2, 1)        \
  METAL_CPU_S3(y, x, z, 1, 0, 2) METAL_CPU_S3(y, z, x, 1, 2, 0)        \
  METAL_CPU_S3(z, x, y, 2, 0, 1) METAL_CPU_S3(z, y, x, 2, 1, 0)        \
  METAL_CPU_S3(x, x, x, 0, 0, 0) METAL_CPU_S3(y, y, y, 1, 1, 1) METAL_CPU_S3(z, z, z, 2, 2, 2)

/// The component names of a vector.
template <typename T, int size>
struct components;
template <typename T>
struct components<T, 2> {
  static constexpr int N = 2;
  union {
    native<T, 2> v;
    struct { T x, y; };
    struct { T r, g; };
    METAL_CPU_PAIRS2
  };
};
template <typename T>
struct components<T, 3> {
  static constexpr int N = 3;
  union {
    native<T, 3> v;
    struct { T x, y, z; };
    struct { T r, g, b; };
    METAL_CPU_PAIRS3
    METAL_CPU_TRIPLES3
  };
};
template <typename T>
struct components<T, 4> {
  static constexpr int N = 4;
  union {
    native<T, 4> v;
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    METAL_CPU_PAIRS4
    METAL_CPU_TRIPLES3
    METAL_CPU_S3(y, z, w, 1, 2, 3)
    METAL_CPU_S3(w, z, y, 3, 2, 1)
    METAL_CPU_S4(x, y, z, w, 0, 1, 2, 3)
    METAL_CPU_S4(w, z, y, x, 3, 2, 1, 0)
    METAL_CPU_S4(y, x, w, z, 1, 0, 3, 2)
    METAL_CPU_S4(z, w, x, y, 2, 3, 0, 1)
    METAL_CPU_S4(y, z, w, x, 1, 2, 3, 0)
    METAL_CPU_S4(w, x, y, z, 3, 0, 1, 2)
    METAL_CPU_S4(x, x, x, x, 0, 0, 0, 0)
    METAL_CPU_S4(y, y, y, y, 1, 1, 1, 1)
    METAL_CPU_S4(z, z, z, z, 2, 2, 2, 2)
    METAL_CPU_S4(w, w, w, w, 3, 3, 3, 3)
  };
};

}  // namespace detail

template <typename T, int N>
struct vec : detail::components<T, N> {
  static_assert(N >= 2 && N <= 4, "Metal's vectors have 2 to 4 components");
  typedef detail::native<T, N> native;
  typedef typename detail::stored<T>::type stored;

  vec() = default;
  // Not defaulted: a copy must be one load of the whole vector, as on a GPU.
  METAL_CPU_INLINE vec(const vec& other) { copy(other); }
  METAL_CPU_INLINE vec& operator=(const vec& other) {
    copy(other);
    return *this;
  }
  METAL_CPU_INLINE vec(T s) { this->v = native(__builtin_bit_cast(stored, s)); }
  METAL_CPU_INLINE explicit vec(native v) { this->v = v; }
  template <typename U, typename = enable_if_t<!__is_same(T, U)>>
  METAL_CPU_INLINE explicit vec(const vec<U, N>& from) {
    if constexpr (detail::computes_natively<T> && detail::computes_natively<U>) {
      this->v = __builtin_convertvector(from.v, native);
    } else {
      for (int i = 0; i < N; ++i) set(i, T(from[i]));
    }
  }
  template <typename V, typename U, int M, int... I, typename = enable_if_t<!__is_same(V, vec)>>
  METAL_CPU_INLINE explicit vec(const detail::swizzle<V, U, M, I...>& from) : vec(V(from)) {}
  template <typename A, typename B, typename... Rest>
  METAL_CPU_INLINE vec(const A& first, const B& second, const Rest&... rest) {
    static_assert(detail::parts<A> + detail::parts<B> + (0 + ... + detail::parts<Rest>) == N,
                  "the parts do not add up to the vector's size");
    T values[N];
    int i = 0;
    detail::append(values, i, first);
    detail::append(values, i, second);
    (detail::append(values, i, rest), ...);
    for (int k = 0; k < N; ++k) set(k, values[k]);
  }

  METAL_CPU_INLINE void copy(const vec& other) {
    // Check mode sees accesses of up to 16 bytes.
    if constexpr (sizeof(native) > 16)
      for (int i = 0; i < N; ++i) (*this)[i] = other[i];
    else
      this->v = other.v;
  }

  METAL_CPU_INLINE const T& operator[](int i) const { return reinterpret_cast<const T*>(this)[i]; }
  METAL_CPU_INLINE T& operator[](int i) { return reinterpret_cast<T*>(this)[i]; }
  METAL_CPU_INLINE void set(int i, T x) { this->v[i] = __builtin_bit_cast(stored, x); }

#define METAL_CPU_OPERATOR(op)                                                \
  METAL_CPU_INLINE friend vec operator op(const vec& a, const vec& b) {       \
    if constexpr (detail::computes_natively<T>) {                             \
      return vec(native(a.v op b.v));                                         \
    } else {                                                                  \
      vec r;                                                                  \
      for (int i = 0; i < N; ++i) r.set(i, T(a[i] op b[i]));                  \
      return r;                                                               \
    }                                                                         \
  }                                                                           \
  METAL_CPU_INLINE vec& operator op##=(const vec& b) { return *this = *this op b; }
  METAL_CPU_OPERATOR(+)
  METAL_CPU_OPERATOR(-)
  METAL_CPU_OPERATOR(*)
  METAL_CPU_OPERATOR(/)
  METAL_CPU_OPERATOR(%)
  METAL_CPU_OPERATOR(&)
  METAL_CPU_OPERATOR(|)
  METAL_CPU_OPERATOR(^)
  METAL_CPU_OPERATOR(<<)
  METAL_CPU_OPERATOR(>>)
#undef METAL_CPU_OPERATOR

#define METAL_CPU_COMPARISON(op)                                                          \
  METAL_CPU_INLINE friend vec<bool, N> operator op(const vec& a, const vec& b) {          \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.set(i, a[i] op b[i]);                                   \
    return r;                                                                             \
  }
  METAL_CPU_COMPARISON(==)
  METAL_CPU_COMPARISON(!=)
  METAL_CPU_COMPARISON(<)
  METAL_CPU_COMPARISON(<=)
  METAL_CPU_COMPARISON(>)
  METAL_CPU_COMPARISON(>=)
  METAL_CPU_COMPARISON(&&)
  METAL_CPU_COMPARISON(||)
#undef METAL_CPU_COMPARISON

  METAL_CPU_INLINE vec operator+() const { return *this; }
  METAL_CPU_INLINE vec operator-() const {
    vec r;
    for (int i = 0; i < N; ++i) r.set(i, T(-(*this)[i]));
    return r;
  }
  METAL_CPU_INLINE vec operator~() const { return vec(native(~this->v)); }
  METAL_CPU_INLINE vec<bool, N> operator!() const {
    vec<bool, N> r;
    for (int i = 0; i < N; ++i) r.set(i, !(*this)[i]);
    return r;
  }
  METAL_CPU_INLINE vec& operator++() { return *this += vec(T(1)); }
  METAL_CPU_INLINE vec& operator--() { return *this -= vec(T(1)); }
};

/// The same without padding or alignment, for memory.
template <typename T, int N>
struct packed_vec {
  T data[N];
  packed_vec() = default;
  METAL_CPU_INLINE packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; ++i) data[i] = v[i];
  }
  METAL_CPU_INLINE operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; ++i) v.set(i, data[i]);
    return v;
  }
  METAL_CPU_INLINE T operator[](int i) const { return data[i]; }
  METAL_CPU_INLINE T& operator[](int i) { return data[i]; }
};

#define METAL_CPU_VECTORS(T)            \
  typedef vec<T, 2> T##2;               \
  typedef vec<T, 3> T##3;               \
  typedef vec<T, 4> T##4;               \
  typedef packed_vec<T, 2> packed_##T##2; \
  typedef packed_vec<T, 3> packed_##T##3; \
  typedef packed_vec<T, 4> packed_##T##4;
METAL_CPU_VECTORS(bool)
METAL_CPU_VECTORS(char)
METAL_CPU_VECTORS(uchar)
METAL_CPU_VECTORS(short)
METAL_CPU_VECTORS(ushort)
METAL_CPU_VECTORS(int)
METAL_CPU_VECTORS(uint)
METAL_CPU_VECTORS(long)
METAL_CPU_VECTORS(ulong)
METAL_CPU_VECTORS(half)
METAL_CPU_VECTORS(bfloat)
METAL_CPU_VECTORS(float)
#undef METAL_CPU_VECTORS

}  // namespace metal
