// SPDX-License-Identifier: Apache-2.0
// Metal's types and functions for clang's AMD back end, as far as kernels use them. Operations that are
// one instruction on an Apple GPU but not here become one line of assembly with a name starting with
// `metal_`, which assembly.py counts; it is never assembled.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(4)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define inline inline __attribute__((always_inline))
#define METAL_FUNC inline

template <typename T, typename U>
inline T as_type(U bits) {
  return __builtin_bit_cast(T, bits);
}

inline uint ctz(uint bits) { return __builtin_ctz(bits); }
inline uint clz(uint bits) { return __builtin_clz(bits); }
inline uint popcount(uint bits) { return __builtin_popcount(bits); }

namespace metal {

template <typename T, int N>
struct ext {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <typename T, int N>
using vec = typename ext<T, N>::type;

namespace detail {

template <typename V, typename T>
inline void put(V& to, int& at, T part) {
  to[at++] = part;
}
template <typename V, typename T, int N>
inline void put(V& to, int& at, T part __attribute__((ext_vector_type(N)))) {
  for (int i = 0; i < N; i++) to[at++] = part[i];
}
template <typename T, int N, typename... Parts>
inline vec<T, N> make_vec(Parts... parts) {
  vec<T, N> made;
  int at = 0;
  (put(made, at, parts), ...);
  while (at < N) made[at++] = made[0];  // one number fills all elements
  return made;
}

}  // namespace detail

template <typename T, typename U>
inline T select(T otherwise, T then, U condition) {
  return condition ? then : otherwise;
}

#define METAL_PROXY_ORDERED(T, LOW, HIGH)           \
  inline T min(T a, T b) { return LOW; }            \
  inline T max(T a, T b) { return HIGH; }           \
  inline T clamp(T value, T low, T high) { return min(max(value, low), high); }
METAL_PROXY_ORDERED(int, a < b ? a : b, a < b ? b : a)
METAL_PROXY_ORDERED(uint, a < b ? a : b, a < b ? b : a)
METAL_PROXY_ORDERED(long, a < b ? a : b, a < b ? b : a)
METAL_PROXY_ORDERED(ulong, a < b ? a : b, a < b ? b : a)
METAL_PROXY_ORDERED(float, __builtin_fminf(a, b), __builtin_fmaxf(a, b))
METAL_PROXY_ORDERED(half, half(__builtin_fminf16(a, b)), half(__builtin_fmaxf16(a, b)))
#undef METAL_PROXY_ORDERED

inline float rint(float value) { return __builtin_rintf(value); }
inline float floor(float value) { return __builtin_floorf(value); }
inline float abs(float value) { return __builtin_fabsf(value); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Functions from one number to one number.
#define METAL_PROXY_UNARY(NAME, T)                               \
  inline T NAME(T value) {                                       \
    T out;                                                       \
    asm("metal_" #NAME " %0, %1" : "=v"(out) : "v"(value));      \
    return out;                                                  \
  }
#define METAL_PROXY_EXPONENTIALS \
  METAL_PROXY_UNARY(exp, float)  \
  METAL_PROXY_UNARY(exp2, float) \
  METAL_PROXY_UNARY(log, float)  \
  METAL_PROXY_UNARY(log2, float) \
  METAL_PROXY_UNARY(sin, float)  \
  METAL_PROXY_UNARY(cos, float)  \
  METAL_PROXY_UNARY(tanh, float) \
  METAL_PROXY_UNARY(sqrt, float) \
  METAL_PROXY_UNARY(rsqrt, float)
METAL_PROXY_EXPONENTIALS
namespace precise {
METAL_PROXY_EXPONENTIALS
}
namespace fast {
METAL_PROXY_EXPONENTIALS
}

// Simdgroup functions: vectors element by element, and halves as floats.
#define METAL_PROXY_REDUCTION(NAME)                                     \
  METAL_PROXY_UNARY(NAME, float)                                        \
  METAL_PROXY_UNARY(NAME, int)                                          \
  METAL_PROXY_UNARY(NAME, uint)                                         \
  inline half NAME(half value) { return half(NAME(float(value))); }     \
  template <typename T, int N>                                          \
  inline vec<T, N> NAME(T value __attribute__((ext_vector_type(N)))) {  \
    vec<T, N> out;                                                      \
    for (int i = 0; i < N; i++) out[i] = NAME(value[i]);                \
    return out;                                                         \
  }
METAL_PROXY_REDUCTION(simd_sum)
METAL_PROXY_REDUCTION(simd_max)
METAL_PROXY_REDUCTION(simd_min)
METAL_PROXY_REDUCTION(simd_prefix_exclusive_sum)
METAL_PROXY_REDUCTION(simd_prefix_inclusive_sum)
METAL_PROXY_REDUCTION(simd_broadcast_first)

// LANE is the location of a lane's number: a register of the thread, or, for distances, one of the
// simdgroup, which has enough of them.
#define METAL_PROXY_SHUFFLE_OF(NAME, T, LANE)                                       \
  inline T NAME(T value, ushort lane) {                                             \
    T out;                                                                          \
    asm("metal_shuffle %0, %1, %2" : "=v"(out) : "v"(value), LANE(uint(lane)));     \
    return out;                                                                     \
  }
#define METAL_PROXY_SHUFFLE(NAME, LANE)      \
  METAL_PROXY_SHUFFLE_OF(NAME, float, LANE)  \
  METAL_PROXY_SHUFFLE_OF(NAME, int, LANE)    \
  METAL_PROXY_SHUFFLE_OF(NAME, uint, LANE)   \
  inline half NAME(half value, ushort lane) { return half(NAME(float(value), lane)); }
METAL_PROXY_SHUFFLE(simd_shuffle, "v")
METAL_PROXY_SHUFFLE(simd_shuffle_xor, "s")
METAL_PROXY_SHUFFLE(simd_shuffle_up, "s")
METAL_PROXY_SHUFFLE(simd_shuffle_down, "s")
METAL_PROXY_SHUFFLE(simd_broadcast, "s")

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  __builtin_amdgcn_s_barrier();
}
inline void simdgroup_barrier(mem_flags) { asm volatile("" ::: "memory"); }

// A lane holds two of the 64 elements.
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  vec<T, 2> held;
  vec<T, 2>& thread_elements() { return held; }
};
template <typename T, int ROWS, int COLUMNS>
inline simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, ROWS, COLUMNS> made;
  made.held[0] = value;
  made.held[1] = value;
  return made;
}

namespace detail {

inline vec<float, 2> registers(vec<float, 2> held) { return held; }
inline uint registers(vec<half, 2> held) { return as_type<uint>(held); }
inline uint registers(vec<bfloat, 2> held) { return as_type<uint>(held); }

}  // namespace detail

template <typename A, typename B>
inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& out,
    const simdgroup_matrix<A, 8, 8>& a,
    const simdgroup_matrix<B, 8, 8>& b,
    const simdgroup_matrix<float, 8, 8>& c) {
  vec<float, 2> sum = c.held;
  asm("metal_multiply %0, %1, %2"
      : "+v"(sum)
      : "v"(detail::registers(a.held)), "v"(detail::registers(b.held)));
  out.held = sum;
}

}  // namespace metal

#define METAL_PROXY_VECTORS(T)   \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
METAL_PROXY_VECTORS(bool)
METAL_PROXY_VECTORS(char)
METAL_PROXY_VECTORS(uchar)
METAL_PROXY_VECTORS(short)
METAL_PROXY_VECTORS(ushort)
METAL_PROXY_VECTORS(int)
METAL_PROXY_VECTORS(uint)
METAL_PROXY_VECTORS(long)
METAL_PROXY_VECTORS(ulong)
METAL_PROXY_VECTORS(half)
METAL_PROXY_VECTORS(bfloat)
METAL_PROXY_VECTORS(float)
#undef METAL_PROXY_VECTORS

template <typename T>
inline constexpr bool is_signed_v = T(-1) < T(0);

// MLX's names.
template <typename T>
struct Limits {
  static constexpr float finite_min = -3.4e38f;
};

using namespace metal;
