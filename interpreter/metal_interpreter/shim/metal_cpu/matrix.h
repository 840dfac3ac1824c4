// SPDX-License-Identifier: Apache-2.0
// simdgroup_matrix<T, 8, 8>: 64 elements, two neighbors of a row in each of 32 lanes.
#pragma once

#include "sync.h"

namespace metal {

template <typename T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "Metal's simdgroup matrices are 8 x 8");
  typedef vec<T, 2> storage_type;
  storage_type elements;

  simdgroup_matrix() = default;
  /// `value` on the diagonal.
  METAL_CPU_INLINE explicit simdgroup_matrix(T value);
  METAL_CPU_INLINE storage_type& thread_elements() { return elements; }
  METAL_CPU_INLINE const storage_type& thread_elements() const { return elements; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

namespace detail {

// Apple's layout, as MLX's and others' kernels rely on it (MSL leaves it open).
METAL_CPU_INLINE uint matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METAL_CPU_INLINE uint matrix_col(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

template <typename A, typename B, typename C>
struct Factors {
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
};

/// a × b + c in float, k rising; rounded to the result's type once.
template <typename D, typename A, typename B, typename C>
void fold_multiply(const Lanes& lanes) {
  typedef float row __attribute__((ext_vector_type(8)));
  row a[8], b[8], sum[8];
  for (uint lane = 0; lane < simdgroup_size; ++lane) {
    Factors<A, B, C> part;
    if (active(lanes, lane))
      part = operand<Factors<A, B, C>>(lanes, lane);
    else
      poison(part);  // a matrix with missing lanes has no value
    const uint r = matrix_row(lane), c = matrix_col(lane);
    for (uint i = 0; i < 2; ++i) {
      a[r][c + i] = float(part.a[i]);
      b[r][c + i] = float(part.b[i]);
      sum[r][c + i] = float(part.c[i]);
    }
  }
  for (uint r = 0; r < 8; ++r)
    for (uint k = 0; k < 8; ++k) sum[r] += a[r][k] * b[k];
  for (uint lane = 0; lane < simdgroup_size; ++lane) {
    if (!active(lanes, lane)) continue;
    const uint r = matrix_row(lane), c = matrix_col(lane);
    result<vec<D, 2>>(lanes, lane) = vec<D, 2>(D(sum[r][c]), D(sum[r][c + 1]));
  }
}

}  // namespace detail

template <typename T, int Cols, int Rows>
METAL_CPU_INLINE simdgroup_matrix<T, Cols, Rows>::simdgroup_matrix(T value) {
  const uint lane = metal_cpu_lane();
  const uint row = detail::matrix_row(lane), col = detail::matrix_col(lane);
  elements = storage_type(row == col ? value : T(0), row == col + 1 ? value : T(0));
}

template <typename T, int Cols, int Rows>
METAL_CPU_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements = vec<T, 2>(value);
  return m;
}
template <typename T, int Cols, int Rows>
METAL_CPU_INLINE simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Cols, Rows>(value);
}

/// Element (row, col) is at src[(origin.y + row) * elements_per_row + origin.x + col]; transposed,
/// row and col change places.
template <typename T, int Cols, int Rows, typename Pointer>
METAL_CPU_INLINE void simdgroup_load(
    thread simdgroup_matrix<T, Cols, Rows>& m, Pointer src, ulong elements_per_row = Cols,
    ulong2 origin = ulong2(0), bool transpose = false) {
  static_assert(__is_same(remove_cv_t<remove_reference_t<decltype(*src)>>, T),
                "simdgroup_load from elements of another type");
  const uint lane = metal_cpu_lane();
  const ulong row = detail::matrix_row(lane), col = detail::matrix_col(lane);
  src += origin.y * elements_per_row + origin.x;
  for (uint i = 0; i < 2; ++i)
    m.elements[i] = transpose ? src[(col + i) * elements_per_row + row]
                              : src[row * elements_per_row + col + i];
}
template <typename T, int Cols, int Rows, typename Pointer>
METAL_CPU_INLINE void simdgroup_store(
    thread const simdgroup_matrix<T, Cols, Rows>& m, Pointer dst, ulong elements_per_row = Cols,
    ulong2 origin = ulong2(0), bool transpose = false) {
  static_assert(__is_same(remove_reference_t<decltype(*dst)>, T),
                "simdgroup_store to elements of another type");
  const uint lane = metal_cpu_lane();
  const ulong row = detail::matrix_row(lane), col = detail::matrix_col(lane);
  dst += origin.y * elements_per_row + origin.x;
  for (uint i = 0; i < 2; ++i)
    (transpose ? dst[(col + i) * elements_per_row + row] : dst[row * elements_per_row + col + i]) =
        m.elements[i];
}

template <typename D, typename A, typename B, typename C>
METAL_CPU_INLINE void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
    const thread simdgroup_matrix<B, 8, 8>& b, const thread simdgroup_matrix<C, 8, 8>& c) {
  const detail::Factors<A, B, C> factors{a.elements, b.elements, c.elements};
  d.elements = detail::collect<vec<D, 2>>(&detail::fold_multiply<D, A, B, C>, factors);
}
template <typename D, typename A, typename B>
METAL_CPU_INLINE void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
    const thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}
template <typename A, typename B>
METAL_CPU_INLINE simdgroup_matrix<A, 8, 8> operator*(
    const thread simdgroup_matrix<A, 8, 8>& a, const thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<A, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
