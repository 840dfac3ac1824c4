// SPDX-License-Identifier: Apache-2.0
// Barriers and simdgroup functions.
#pragma once

#include "../../runtime/abi.h"
#include "vec.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
METAL_CPU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}

METAL_CPU_SYNC METAL_CPU_INLINE void threadgroup_barrier(mem_flags flags) {
  metal_cpu_threadgroup_barrier(uint(flags));
}
METAL_CPU_SYNC METAL_CPU_INLINE void simdgroup_barrier(mem_flags flags) { metal_cpu_simdgroup_barrier(uint(flags)); }

namespace detail {

using metal_cpu::Lanes;
using metal_cpu::simdgroup_size;

template <typename T>
METAL_CPU_INLINE const T& operand(const Lanes& lanes, uint lane) {
  return *static_cast<const T*>(lanes.in[lane]);
}
template <typename T>
METAL_CPU_INLINE T& result(const Lanes& lanes, uint lane) {
  return *static_cast<T*>(lanes.out[lane]);
}
METAL_CPU_INLINE bool active(const Lanes& lanes, uint lane) { return lanes.active >> lane & 1; }

/// Passes this lane's operand to `fold`; returns its result for the lane.
template <typename Out, typename In>
METAL_CPU_SYNC METAL_CPU_INLINE Out collect(metal_cpu::Fold fold, const In& in) {
  Out out;
  metal_cpu_collective(fold, &in, &out);
  return out;
}

// ---- reductions ----

/// Pairs of lanes 1, 2, 4, 8, 16 apart, in T's own precision. The order on a GPU is not documented.
template <typename T, typename Op>
void fold_reduce(const Lanes& lanes) {
  T values[simdgroup_size];
  uint have = lanes.active;
  for (uint lane = 0; lane < simdgroup_size; ++lane)
    if (active(lanes, lane)) values[lane] = operand<T>(lanes, lane);
  for (uint step = 1; step < simdgroup_size; step *= 2)
    for (uint lane = 0; lane + step < simdgroup_size; lane += 2 * step) {
      if (!(have >> (lane + step) & 1)) continue;
      values[lane] =
          have >> lane & 1 ? Op::apply(values[lane], values[lane + step]) : values[lane + step];
      have |= 1u << lane;
    }
  for (uint lane = 0; lane < simdgroup_size; ++lane)
    if (active(lanes, lane)) result<T>(lanes, lane) = values[0];
}

template <typename T, typename Op, bool inclusive>
void fold_prefix(const Lanes& lanes) {
  T sum = T(Op::template identity<T>());
  for (uint lane = 0; lane < simdgroup_size; ++lane) {
    if (!active(lanes, lane)) continue;
    const T value = operand<T>(lanes, lane);
    const T next = Op::apply(sum, value);
    result<T>(lanes, lane) = inclusive ? next : sum;
    sum = next;
  }
}

/// Over each quad's four lanes.
template <typename T, typename Op>
void fold_quads(const Lanes& lanes) {
  for (uint quad = 0; quad < simdgroup_size; quad += 4) {
    bool any = false;
    T sum;
    for (uint lane = quad; lane < quad + 4; ++lane) {
      if (!active(lanes, lane)) continue;
      sum = any ? Op::apply(sum, operand<T>(lanes, lane)) : operand<T>(lanes, lane);
      any = true;
    }
    for (uint lane = quad; lane < quad + 4; ++lane)
      if (active(lanes, lane)) result<T>(lanes, lane) = sum;
  }
}

struct Add {
  template <typename T> METAL_CPU_INLINE static T apply(T a, T b) { return T(a + b); }
  template <typename T> METAL_CPU_INLINE static int identity() { return 0; }
};
struct Multiply {
  template <typename T> METAL_CPU_INLINE static T apply(T a, T b) { return T(a * b); }
  template <typename T> METAL_CPU_INLINE static int identity() { return 1; }
};
struct BitAnd {
  template <typename T> METAL_CPU_INLINE static T apply(T a, T b) { return T(a & b); }
};
struct BitOr {
  template <typename T> METAL_CPU_INLINE static T apply(T a, T b) { return T(a | b); }
};
struct BitXor {
  template <typename T> METAL_CPU_INLINE static T apply(T a, T b) { return T(a ^ b); }
};
template <bool larger>
struct Extreme {
  template <typename T> METAL_CPU_INLINE static T apply(T a, T b) {
    if constexpr (is_vec<T>::size > 0) {
      T r;
      for (int i = 0; i < is_vec<T>::size; ++i) r.set(i, apply(a[i], b[i]));
      return r;
    } else if constexpr (is_floating_point_v<T>) {  // ignores a NaN, as fmax and fmin do
      if (a != a) return b;
      if (b != b) return a;
      return (larger ? a < b : b < a) ? b : a;
    } else {
      return (larger ? a < b : b < a) ? b : a;
    }
  }
};

// ---- moving values between lanes ----

/// Result for a lane that reads from an inactive or nonexistent lane: undefined in
/// Metal, a NaN or a huge number here.
template <typename T>
METAL_CPU_INLINE void poison(T& value) {
  __builtin_memset(static_cast<void*>(&value), 0xFF, sizeof value);
}

template <typename T>
struct Request {
  T value;
  uint from;  // lane
  bool keep;  // no such lane: the result is `other`
  T other;
};

template <typename T>
void fold_shuffle(const Lanes& lanes) {
  T values[simdgroup_size];
  for (uint lane = 0; lane < simdgroup_size; ++lane)
    if (active(lanes, lane)) values[lane] = operand<Request<T>>(lanes, lane).value;
  for (uint lane = 0; lane < simdgroup_size; ++lane) {
    if (!active(lanes, lane)) continue;
    const Request<T>& request = operand<Request<T>>(lanes, lane);
    T& to = result<T>(lanes, lane);
    if (request.keep)
      to = request.other;
    else if (request.from < simdgroup_size && active(lanes, request.from))
      to = values[request.from];
    else
      poison(to);
  }
}

template <typename T>
METAL_CPU_INLINE T shuffle(T value, uint from) {
  return collect<T>(&fold_shuffle<T>, Request<T>{value, from, false, value});
}
template <typename T>
METAL_CPU_INLINE T shuffle_or(T value, uint from, bool keep, T other) {
  return collect<T>(&fold_shuffle<T>, Request<T>{value, from, keep, other});
}

template <typename T>
void fold_broadcast_first(const Lanes& lanes) {
  const T value = operand<T>(lanes, __builtin_ctz(lanes.active));
  for (uint lane = 0; lane < simdgroup_size; ++lane)
    if (active(lanes, lane)) result<T>(lanes, lane) = value;
}

inline void fold_ballot(const Lanes& lanes) {
  uint votes = 0;
  for (uint lane = 0; lane < simdgroup_size; ++lane)
    if (active(lanes, lane) && operand<bool>(lanes, lane)) votes |= 1u << lane;
  for (uint lane = 0; lane < simdgroup_size; ++lane)
    if (active(lanes, lane)) result<uint2>(lanes, lane) = uint2(votes, lanes.active);
}
/// (votes, active lanes)
METAL_CPU_INLINE uint2 ballot(bool vote) { return collect<uint2>(&fold_ballot, vote); }

}  // namespace detail

#define METAL_CPU_REDUCTION(name, Op)                                               \
  template <typename T>                                                             \
  METAL_CPU_INLINE T simd_##name(T value) {                                         \
    return detail::collect<T>(&detail::fold_reduce<T, detail::Op>, value);          \
  }                                                                                 \
  template <typename T>                                                             \
  METAL_CPU_INLINE T quad_##name(T value) {                                         \
    return detail::collect<T>(&detail::fold_quads<T, detail::Op>, value);           \
  }
METAL_CPU_REDUCTION(sum, Add)
METAL_CPU_REDUCTION(product, Multiply)
METAL_CPU_REDUCTION(max, Extreme<true>)
METAL_CPU_REDUCTION(min, Extreme<false>)
METAL_CPU_REDUCTION(and, BitAnd)
METAL_CPU_REDUCTION(or, BitOr)
METAL_CPU_REDUCTION(xor, BitXor)
#undef METAL_CPU_REDUCTION

template <typename T>
METAL_CPU_INLINE T simd_prefix_inclusive_sum(T value) {
  return detail::collect<T>(&detail::fold_prefix<T, detail::Add, true>, value);
}
template <typename T>
METAL_CPU_INLINE T simd_prefix_exclusive_sum(T value) {
  return detail::collect<T>(&detail::fold_prefix<T, detail::Add, false>, value);
}
template <typename T>
METAL_CPU_INLINE T simd_prefix_inclusive_product(T value) {
  return detail::collect<T>(&detail::fold_prefix<T, detail::Multiply, true>, value);
}
template <typename T>
METAL_CPU_INLINE T simd_prefix_exclusive_product(T value) {
  return detail::collect<T>(&detail::fold_prefix<T, detail::Multiply, false>, value);
}

template <typename T>
METAL_CPU_INLINE T simd_broadcast(T value, ushort lane) {
  return detail::shuffle(value, lane);
}
template <typename T>
METAL_CPU_INLINE T simd_broadcast_first(T value) {
  return detail::collect<T>(&detail::fold_broadcast_first<T>, value);
}
template <typename T>
METAL_CPU_INLINE T simd_shuffle(T value, ushort lane) {
  return detail::shuffle(value, lane);
}
template <typename T>
METAL_CPU_INLINE T simd_shuffle_xor(T value, ushort mask) {
  return detail::shuffle(value, metal_cpu_lane() ^ mask);
}
/// The lowest `delta` lanes keep their own value.
template <typename T>
METAL_CPU_INLINE T simd_shuffle_up(T value, ushort delta) {
  const uint lane = metal_cpu_lane();
  return detail::shuffle_or(value, lane - delta, lane < delta, value);
}
template <typename T>
METAL_CPU_INLINE T simd_shuffle_down(T value, ushort delta) {
  const uint lane = metal_cpu_lane();
  return detail::shuffle_or(value, lane + delta, lane + delta >= 32, value);
}
template <typename T>
METAL_CPU_INLINE T simd_shuffle_rotate_up(T value, ushort delta) {
  return detail::shuffle(value, (metal_cpu_lane() - delta) & 31);
}
template <typename T>
METAL_CPU_INLINE T simd_shuffle_rotate_down(T value, ushort delta) {
  return detail::shuffle(value, (metal_cpu_lane() + delta) & 31);
}
/// Lanes past the upper end come from the lower end of `filling`, and so on in a circle.
template <typename T>
METAL_CPU_INLINE T simd_shuffle_and_fill_down(T value, T filling, ushort delta) {
  const uint lane = metal_cpu_lane();
  const T filled = detail::shuffle(filling, (lane + delta) & 31);
  return detail::shuffle_or(value, lane + delta, lane + delta >= 32, filled);
}
template <typename T>
METAL_CPU_INLINE T simd_shuffle_and_fill_up(T value, T filling, ushort delta) {
  const uint lane = metal_cpu_lane();
  const T filled = detail::shuffle(filling, (lane - delta) & 31);
  return detail::shuffle_or(value, lane - delta, lane < delta, filled);
}

template <typename T>
METAL_CPU_INLINE T quad_broadcast(T value, ushort lane) {
  return detail::shuffle(value, (metal_cpu_lane() & ~3u) + lane);
}
template <typename T>
METAL_CPU_INLINE T quad_shuffle(T value, ushort lane) {
  return detail::shuffle(value, (metal_cpu_lane() & ~3u) + lane);
}
template <typename T>
METAL_CPU_INLINE T quad_shuffle_xor(T value, ushort mask) {
  return detail::shuffle(value, (metal_cpu_lane() & ~3u) + ((metal_cpu_lane() ^ mask) & 3));
}
template <typename T>
METAL_CPU_INLINE T quad_shuffle_up(T value, ushort delta) {
  const uint lane = metal_cpu_lane() & 3;
  return detail::shuffle_or(value, metal_cpu_lane() - delta, lane < delta, value);
}
template <typename T>
METAL_CPU_INLINE T quad_shuffle_down(T value, ushort delta) {
  const uint lane = metal_cpu_lane() & 3;
  return detail::shuffle_or(value, metal_cpu_lane() + delta, lane + delta >= 4, value);
}

class simd_vote {
 public:
  typedef ulong vote_t;
  METAL_CPU_INLINE explicit constexpr simd_vote(vote_t mask = 0) : mask_(mask) {}
  METAL_CPU_INLINE explicit constexpr operator vote_t() const { return mask_; }
  METAL_CPU_INLINE constexpr bool all() const { return mask_ == 0xFFFFFFFFul; }
  METAL_CPU_INLINE constexpr bool any() const { return mask_ != 0; }

 private:
  vote_t mask_;
};

METAL_CPU_INLINE simd_vote simd_ballot(bool vote) { return simd_vote(detail::ballot(vote).x); }
METAL_CPU_INLINE simd_vote simd_active_threads_mask() { return simd_vote(detail::ballot(true).y); }
METAL_CPU_INLINE bool simd_any(bool vote) { return detail::ballot(vote).x != 0; }
METAL_CPU_INLINE bool simd_all(bool vote) {
  const uint2 votes = detail::ballot(vote);
  return votes.x == votes.y;
}
METAL_CPU_INLINE bool simd_is_first() {
  const uint lanes = detail::ballot(true).y;
  return uint(__builtin_ctz(lanes)) == metal_cpu_lane();
}

}  // namespace metal
