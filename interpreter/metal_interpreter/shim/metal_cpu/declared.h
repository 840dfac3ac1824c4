// SPDX-License-Identifier: Apache-2.0
// Declarations of Metal's functions, to compile kernels with real address spaces without running
// them. A class cannot be read from another address space without a constructor for
// each, so vectors and bfloat are the compiler's own here. That makes this pass less strict about
// conversions than the others, which check them.
#pragma once

#include "types.h"

/// Where the interpreter puts a kernel's threadgroup variables.
threadgroup void* metal_cpu_threadgroup_memory(
    unsigned index, const char* name, unsigned long bytes, unsigned long element_bytes,
    unsigned long alignment);

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

namespace detail {
/// `vec<T, N>(parts...)`, which the compiler's vectors lack.
template <typename T, int N, typename... Parts>
vec<T, N> make_vec(Parts... parts);
/// T, but not deduced from this argument.
template <typename T>
using given = typename remove_cv<T>::type;
}  // namespace detail

#define METAL_CPU_VECTORS(T)       \
  typedef vec<T, 2> T##2;          \
  typedef vec<T, 3> T##3;          \
  typedef vec<T, 4> T##4;          \
  typedef vec<T, 2> packed_##T##2; \
  typedef vec<T, 3> packed_##T##3; \
  typedef vec<T, 4> packed_##T##4;
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

#define METAL_CPU_1(name) template <typename T> T name(T);
#define METAL_CPU_2(name) template <typename T> T name(T, T);
#define METAL_CPU_3(name) template <typename T> T name(T, T, T);
#define METAL_CPU_TEST(name)              \
  template <typename T> bool name(T);     \
  template <typename T, int N> vec<bool, N> name(vec<T, N>);

// ---- math ----

#define METAL_CPU_REAL                                                                      \
  METAL_CPU_1(exp) METAL_CPU_1(exp2) METAL_CPU_1(exp10) METAL_CPU_1(log) METAL_CPU_1(log2)  \
  METAL_CPU_1(log10) METAL_CPU_1(sqrt) METAL_CPU_1(rsqrt) METAL_CPU_1(sin) METAL_CPU_1(cos) \
  METAL_CPU_1(tan) METAL_CPU_1(asin) METAL_CPU_1(acos) METAL_CPU_1(atan) METAL_CPU_1(sinh)  \
  METAL_CPU_1(cosh) METAL_CPU_1(tanh) METAL_CPU_1(asinh) METAL_CPU_1(acosh)                 \
  METAL_CPU_1(atanh) METAL_CPU_1(sinpi) METAL_CPU_1(cospi) METAL_CPU_1(tanpi)               \
  METAL_CPU_1(floor) METAL_CPU_1(ceil) METAL_CPU_1(trunc) METAL_CPU_1(round)                \
  METAL_CPU_1(rint) METAL_CPU_1(fabs) METAL_CPU_1(fract) METAL_CPU_1(sign) METAL_CPU_2(pow) \
  METAL_CPU_2(powr) METAL_CPU_2(atan2) METAL_CPU_2(fmod) METAL_CPU_2(fmax)                  \
  METAL_CPU_2(fmin) METAL_CPU_2(fdim) METAL_CPU_2(copysign) METAL_CPU_2(divide)             \
  METAL_CPU_3(fma)
METAL_CPU_REAL
namespace fast {
METAL_CPU_REAL
}
namespace precise {
METAL_CPU_REAL
}
#undef METAL_CPU_REAL

METAL_CPU_TEST(isnan)
METAL_CPU_TEST(isinf)
METAL_CPU_TEST(isfinite)
METAL_CPU_TEST(signbit)
template <typename T, typename I> T ldexp(T, I);
template <typename T> int ilogb(T);
template <typename T, int N> vec<int, N> ilogb(vec<T, N>);
template <typename T, typename I> T frexp(T, thread I&);
template <typename T> T modf(T, thread T&);
template <typename T> T sincos(T, thread T&);

METAL_CPU_1(abs)
METAL_CPU_1(saturate)
METAL_CPU_2(max)
METAL_CPU_2(min)
METAL_CPU_2(step)
METAL_CPU_3(max3)
METAL_CPU_3(min3)
METAL_CPU_3(median3)
METAL_CPU_3(clamp)
METAL_CPU_3(mix)
METAL_CPU_3(smoothstep)
template <typename T, int N> vec<T, N> max(vec<T, N>, T);
template <typename T, int N> vec<T, N> min(vec<T, N>, T);
template <typename T, int N> vec<T, N> clamp(vec<T, N>, T, T);
template <typename T, typename B> T select(T, T, B);

// ---- integers ----

METAL_CPU_1(popcount)
METAL_CPU_1(clz)
METAL_CPU_1(ctz)
METAL_CPU_1(reverse_bits)
METAL_CPU_2(absdiff)
METAL_CPU_2(addsat)
METAL_CPU_2(subsat)
METAL_CPU_2(hadd)
METAL_CPU_2(rhadd)
METAL_CPU_2(mulhi)
METAL_CPU_2(rotate)
METAL_CPU_2(mul24)
METAL_CPU_3(madhi)
METAL_CPU_3(mad24)
template <typename T> T extract_bits(T, uint, uint);
template <typename T> T insert_bits(T, T, uint, uint);

// ---- vectors ----

template <typename B> bool any(B);
template <typename B> bool all(B);
template <typename T, int N> T dot(vec<T, N>, vec<T, N>);
template <typename T, int N> T length_squared(vec<T, N>);
template <typename T, int N> T length(vec<T, N>);
template <typename T, int N> T distance(vec<T, N>, vec<T, N>);
METAL_CPU_1(normalize)
METAL_CPU_2(cross)

// ---- barriers and simdgroups ----

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define METAL_CPU_LANE(name) template <typename T> T name(T, ushort);
METAL_CPU_1(simd_sum)
METAL_CPU_1(simd_product)
METAL_CPU_1(simd_max)
METAL_CPU_1(simd_min)
METAL_CPU_1(simd_and)
METAL_CPU_1(simd_or)
METAL_CPU_1(simd_xor)
METAL_CPU_1(quad_sum)
METAL_CPU_1(quad_product)
METAL_CPU_1(quad_max)
METAL_CPU_1(quad_min)
METAL_CPU_1(quad_and)
METAL_CPU_1(quad_or)
METAL_CPU_1(quad_xor)
METAL_CPU_1(simd_prefix_inclusive_sum)
METAL_CPU_1(simd_prefix_exclusive_sum)
METAL_CPU_1(simd_prefix_inclusive_product)
METAL_CPU_1(simd_prefix_exclusive_product)
METAL_CPU_1(simd_broadcast_first)
METAL_CPU_LANE(simd_broadcast)
METAL_CPU_LANE(simd_shuffle)
METAL_CPU_LANE(simd_shuffle_xor)
METAL_CPU_LANE(simd_shuffle_up)
METAL_CPU_LANE(simd_shuffle_down)
METAL_CPU_LANE(simd_shuffle_rotate_up)
METAL_CPU_LANE(simd_shuffle_rotate_down)
METAL_CPU_LANE(quad_broadcast)
METAL_CPU_LANE(quad_shuffle)
METAL_CPU_LANE(quad_shuffle_xor)
METAL_CPU_LANE(quad_shuffle_up)
METAL_CPU_LANE(quad_shuffle_down)
template <typename T> T simd_shuffle_and_fill_up(T, T, ushort);
template <typename T> T simd_shuffle_and_fill_down(T, T, ushort);

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit simd_vote(vote_t = 0);
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

#undef METAL_CPU_LANE
#undef METAL_CPU_1
#undef METAL_CPU_2
#undef METAL_CPU_3
#undef METAL_CPU_TEST

// ---- matrices ----

template <typename T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "Metal's simdgroup matrices are 8 x 8");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread storage_type& thread_elements();
  const thread storage_type& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Cols, int Rows>
simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T);
template <typename T, int Cols, int Rows>
simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T);

#define METAL_CPU_MOVE(name, matrix, space)                                                \
  template <typename T, int Cols, int Rows>                                                \
  void name(thread matrix simdgroup_matrix<T, Cols, Rows>&, space detail::given<T>*,       \
            ulong elements_per_row = Cols, ulong2 origin = {}, bool transpose = false);
METAL_CPU_MOVE(simdgroup_load, , const device)
METAL_CPU_MOVE(simdgroup_load, , constant)
METAL_CPU_MOVE(simdgroup_load, , const threadgroup)
METAL_CPU_MOVE(simdgroup_store, const, device)
METAL_CPU_MOVE(simdgroup_store, const, threadgroup)
#undef METAL_CPU_MOVE

template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>&, const thread simdgroup_matrix<A, 8, 8>&,
    const thread simdgroup_matrix<B, 8, 8>&, const thread simdgroup_matrix<C, 8, 8>&);
template <typename D, typename A, typename B>
void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>&, const thread simdgroup_matrix<A, 8, 8>&,
    const thread simdgroup_matrix<B, 8, 8>&);
template <typename A, typename B>
simdgroup_matrix<A, 8, 8> operator*(
    const thread simdgroup_matrix<A, 8, 8>&, const thread simdgroup_matrix<B, 8, 8>&);

// ---- atomics ----

enum memory_order { memory_order_relaxed = 0 };
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};
template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

#define METAL_CPU_FETCH(name, space) \
  template <typename T>              \
  T atomic_##name##_explicit(volatile space atomic<T>*, detail::given<T>, memory_order);
#define METAL_CPU_ATOMICS(space)                                                               \
  template <typename T>                                                                        \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                       \
  template <typename T>                                                                        \
  void atomic_store_explicit(volatile space atomic<T>*, detail::given<T>, memory_order);       \
  template <typename T>                                                                        \
  bool atomic_compare_exchange_weak_explicit(                                                  \
      volatile space atomic<T>*, thread detail::given<T>*, detail::given<T>, memory_order,     \
      memory_order);                                                                           \
  METAL_CPU_FETCH(exchange, space)                                                             \
  METAL_CPU_FETCH(fetch_add, space)                                                            \
  METAL_CPU_FETCH(fetch_sub, space)                                                            \
  METAL_CPU_FETCH(fetch_and, space)                                                            \
  METAL_CPU_FETCH(fetch_or, space)                                                             \
  METAL_CPU_FETCH(fetch_xor, space)                                                            \
  METAL_CPU_FETCH(fetch_max, space)                                                            \
  METAL_CPU_FETCH(fetch_min, space)
METAL_CPU_ATOMICS(device)
METAL_CPU_ATOMICS(threadgroup)
#undef METAL_CPU_ATOMICS
#undef METAL_CPU_FETCH

}  // namespace metal
