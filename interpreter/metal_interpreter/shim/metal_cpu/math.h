// SPDX-License-Identifier: Apache-2.0
// Math, integer, common and geometric functions. float and half compute in float (half then rounds
// once), through the C library: closer to exact than a GPU, so take tolerances from MSL's
// table of errors and not from here.
#pragma once

#include "vec.h"

namespace metal {
namespace detail {

/// Applies `f` to each component of vectors, or to scalars.
template <typename T, typename F, typename... Rest>
METAL_CPU_INLINE auto each(F f, const T& x, const Rest&... rest) {
  if constexpr (is_vec<T>::size == 0) {
    return f(x, rest...);
  } else {
    vec<decltype(f(x[0], rest[0]...)), is_vec<T>::size> r;
    for (int i = 0; i < is_vec<T>::size; ++i) r.set(i, f(x[i], rest[i]...));
    return r;
  }
}

/// Element type and value type of a scalar, a vector or a swizzle.
template <typename T>
using scalar = typename is_vec<T>::element;
template <typename T>
using settled = typename is_vec<T>::type;

template <typename T>
inline constexpr bool real = is_floating_point_v<scalar<T>>;
template <typename T>
inline constexpr bool integer = is_integral_v<scalar<T>> && !__is_same(scalar<T>, bool);

template <typename T, typename R = settled<T>>
using if_real = enable_if_t<real<T>, R>;
template <typename T, typename R = T>
using if_integer = enable_if_t<integer<T>, R>;
template <typename T>
using bools = conditional_t<is_vec<T>::size == 0, bool, vec<bool, is_vec<T>::size ? is_vec<T>::size : 2>>;
template <typename T>
using ints = conditional_t<is_vec<T>::size == 0, int, vec<int, is_vec<T>::size ? is_vec<T>::size : 2>>;

METAL_CPU_INLINE float exp10_(float x) { return __builtin_powf(10.0f, x); }
METAL_CPU_INLINE float rsqrt_(float x) { return 1.0f / __builtin_sqrtf(x); }
METAL_CPU_INLINE float fract_(float x) {
  const float f = x - __builtin_floorf(x);
  return f < 1.0f ? f : 0x1.fffffep-1f;
}
METAL_CPU_INLINE float sinpi_(float x) { return __builtin_sin(3.14159265358979323846 * x); }
METAL_CPU_INLINE float cospi_(float x) { return __builtin_cos(3.14159265358979323846 * x); }
METAL_CPU_INLINE float tanpi_(float x) { return __builtin_tan(3.14159265358979323846 * x); }
METAL_CPU_INLINE float sign_(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f; }

}  // namespace detail

#define METAL_CPU_REAL1(name, f)                                                         \
  template <typename T>                                                                  \
  METAL_CPU_INLINE detail::if_real<T> name(T x) {                                        \
    return detail::each([](auto a) { return decltype(a)(f(float(a))); }, x);             \
  }
#define METAL_CPU_REAL2(name, f)                                                         \
  template <typename T>                                                                  \
  METAL_CPU_INLINE detail::if_real<T> name(T x, T y) {                                   \
    return detail::each([](auto a, auto b) { return decltype(a)(f(float(a), float(b))); }, x, y); \
  }
#define METAL_CPU_FUNCTIONS                       \
  METAL_CPU_REAL1(exp, __builtin_expf)            \
  METAL_CPU_REAL1(exp2, __builtin_exp2f)          \
  METAL_CPU_REAL1(exp10, detail::exp10_)          \
  METAL_CPU_REAL1(log, __builtin_logf)            \
  METAL_CPU_REAL1(log2, __builtin_log2f)          \
  METAL_CPU_REAL1(log10, __builtin_log10f)        \
  METAL_CPU_REAL1(sqrt, __builtin_sqrtf)          \
  METAL_CPU_REAL1(rsqrt, detail::rsqrt_)          \
  METAL_CPU_REAL1(sin, __builtin_sinf)            \
  METAL_CPU_REAL1(cos, __builtin_cosf)            \
  METAL_CPU_REAL1(tan, __builtin_tanf)            \
  METAL_CPU_REAL1(asin, __builtin_asinf)          \
  METAL_CPU_REAL1(acos, __builtin_acosf)          \
  METAL_CPU_REAL1(atan, __builtin_atanf)          \
  METAL_CPU_REAL1(sinh, __builtin_sinhf)          \
  METAL_CPU_REAL1(cosh, __builtin_coshf)          \
  METAL_CPU_REAL1(tanh, __builtin_tanhf)          \
  METAL_CPU_REAL1(asinh, __builtin_asinhf)        \
  METAL_CPU_REAL1(acosh, __builtin_acoshf)        \
  METAL_CPU_REAL1(atanh, __builtin_atanhf)        \
  METAL_CPU_REAL1(sinpi, detail::sinpi_)          \
  METAL_CPU_REAL1(cospi, detail::cospi_)          \
  METAL_CPU_REAL1(tanpi, detail::tanpi_)          \
  METAL_CPU_REAL1(floor, __builtin_floorf)        \
  METAL_CPU_REAL1(ceil, __builtin_ceilf)          \
  METAL_CPU_REAL1(trunc, __builtin_truncf)        \
  METAL_CPU_REAL1(round, __builtin_roundf)        \
  METAL_CPU_REAL1(rint, __builtin_rintf)          \
  METAL_CPU_REAL1(fabs, __builtin_fabsf)          \
  METAL_CPU_REAL1(fract, detail::fract_)          \
  METAL_CPU_REAL1(sign, detail::sign_)            \
  METAL_CPU_REAL2(pow, __builtin_powf)            \
  METAL_CPU_REAL2(powr, __builtin_powf)           \
  METAL_CPU_REAL2(atan2, __builtin_atan2f)        \
  METAL_CPU_REAL2(fmod, __builtin_fmodf)          \
  METAL_CPU_REAL2(fmax, __builtin_fmaxf)          \
  METAL_CPU_REAL2(fmin, __builtin_fminf)          \
  METAL_CPU_REAL2(fdim, __builtin_fdimf)          \
  METAL_CPU_REAL2(copysign, __builtin_copysignf)  \
  METAL_CPU_REAL2(divide, [](float a, float b) { return a / b; })

METAL_CPU_FUNCTIONS
// As exact as the default here. The error of fast:: on a GPU is not modeled.
namespace fast {
METAL_CPU_FUNCTIONS
}
namespace precise {
METAL_CPU_FUNCTIONS
}
#undef METAL_CPU_FUNCTIONS
#undef METAL_CPU_REAL1
#undef METAL_CPU_REAL2

#define METAL_CPU_TEST(name, expression)                                     \
  template <typename T>                                                      \
  METAL_CPU_INLINE detail::if_real<T, detail::bools<T>> name(T x) {          \
    return detail::each([](auto v) { const float a = float(v); return bool(expression); }, x); \
  }
METAL_CPU_TEST(isnan, a != a)
METAL_CPU_TEST(isinf, __builtin_fabsf(a) == __builtin_inff())
METAL_CPU_TEST(isfinite, __builtin_fabsf(a) < __builtin_inff())
METAL_CPU_TEST(signbit, __builtin_signbit(a))
#undef METAL_CPU_TEST

template <typename T>
METAL_CPU_INLINE detail::if_real<T> fma(T x, T y, T z) {
  return detail::each(
      [](auto a, auto b, auto c) {
        return decltype(a)(__builtin_fmaf(float(a), float(b), float(c)));
      },
      x, y, z);
}
namespace precise {
using metal::fma;
}
namespace fast {
using metal::fma;
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T> ldexp(T x, detail::ints<T> e) {
  return detail::each([](auto a, int n) { return decltype(a)(__builtin_ldexpf(float(a), n)); }, x, e);
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T, detail::ints<T>> ilogb(T x) {
  return detail::each([](auto a) { return int(__builtin_ilogbf(float(a))); }, x);
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T> frexp(T x, thread detail::ints<T>& exponent) {
  if constexpr (detail::is_vec<T>::size == 0) {
    return T(__builtin_frexpf(float(x), &exponent));
  } else {
    T r;
    for (int i = 0; i < detail::is_vec<T>::size; ++i) r[i] = frexp(x[i], exponent[i]);
    return r;
  }
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T> modf(T x, thread T& whole) {
  whole = trunc(x);
  return x - whole;
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T> sincos(T x, thread T& cosine) {
  cosine = cos(x);
  return sin(x);
}

// ---- larger, smaller, between ----

template <typename T>
METAL_CPU_INLINE enable_if_t<detail::real<T> || detail::integer<T>, T> max(T x, T y) {
  if constexpr (detail::real<T>) return fmax(x, y);
  else return detail::each([](auto a, auto b) { return a < b ? b : a; }, x, y);
}
template <typename T>
METAL_CPU_INLINE enable_if_t<detail::real<T> || detail::integer<T>, T> min(T x, T y) {
  if constexpr (detail::real<T>) return fmin(x, y);
  else return detail::each([](auto a, auto b) { return b < a ? b : a; }, x, y);
}
template <typename T>
METAL_CPU_INLINE T max3(T x, T y, T z) { return max(x, max(y, z)); }
template <typename T>
METAL_CPU_INLINE T min3(T x, T y, T z) { return min(x, min(y, z)); }
template <typename T>
METAL_CPU_INLINE T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }
template <typename T>
METAL_CPU_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T, int N>
METAL_CPU_INLINE vec<T, N> max(vec<T, N> x, T y) { return max(x, vec<T, N>(y)); }
template <typename T, int N>
METAL_CPU_INLINE vec<T, N> min(vec<T, N> x, T y) { return min(x, vec<T, N>(y)); }
template <typename T, int N>
METAL_CPU_INLINE vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return clamp(x, vec<T, N>(low), vec<T, N>(high));
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T> saturate(T x) { return clamp(x, T(0), T(1)); }
template <typename T>
METAL_CPU_INLINE detail::if_real<T> mix(T x, T y, T a) { return x + (y - x) * a; }
template <typename T>
METAL_CPU_INLINE detail::if_real<T> step(T edge, T x) {
  return detail::each([](auto e, auto v) { return decltype(v)(float(v) < float(e) ? 0.0f : 1.0f); },
                      edge, x);
}
template <typename T>
METAL_CPU_INLINE detail::if_real<T> smoothstep(T low, T high, T x) {
  const T t = saturate((x - low) / (high - low));
  return t * t * (T(3) - T(2) * t);
}
template <typename T>
METAL_CPU_INLINE enable_if_t<detail::real<T> || detail::integer<T>, T> abs(T x) {
  if constexpr (detail::real<T>) return fabs(x);
  else if constexpr (is_unsigned_v<detail::scalar<T>>) return x;
  else return detail::each([](auto a) { return decltype(a)(a < 0 ? -a : a); }, x);
}
template <typename T>
METAL_CPU_INLINE T select(T x, T y, detail::bools<T> choose_y) {
  return detail::each([](auto a, auto b, bool c) { return c ? b : a; }, x, y, choose_y);
}

// ---- integers ----

#define METAL_CPU_INTEGER1(name, expression)                                               \
  template <typename T>                                                                    \
  METAL_CPU_INLINE detail::if_integer<T> name(T x) {                                       \
    return detail::each(                                                                   \
        [](auto a) {                                                                       \
          typedef decltype(a) S;                                                           \
          [[maybe_unused]] constexpr int bits = sizeof(S) * 8;                             \
          [[maybe_unused]] const make_unsigned_t<S> u = make_unsigned_t<S>(a);             \
          return S(expression);                                                            \
        },                                                                                 \
        x);                                                                                \
  }
#define METAL_CPU_INTEGER2(name, expression)                                               \
  template <typename T>                                                                    \
  METAL_CPU_INLINE detail::if_integer<T> name(T x, T y) {                                  \
    return detail::each(                                                                   \
        [](auto a, auto b) {                                                               \
          typedef decltype(a) S;                                                           \
          [[maybe_unused]] constexpr int bits = sizeof(S) * 8;                             \
          [[maybe_unused]] typedef make_unsigned_t<S> U;                                   \
          [[maybe_unused]] typedef __int128 wide;                                          \
          [[maybe_unused]] constexpr wide low = numeric_limits<S>::min();                  \
          [[maybe_unused]] constexpr wide high = numeric_limits<S>::max();                 \
          return S(expression);                                                            \
        },                                                                                 \
        x, y);                                                                             \
  }
METAL_CPU_INTEGER1(popcount, __builtin_popcountll((unsigned long long)u))
METAL_CPU_INTEGER1(clz, u == 0 ? bits : __builtin_clzll((unsigned long long)u) - (64 - bits))
METAL_CPU_INTEGER1(ctz, u == 0 ? bits : __builtin_ctzll((unsigned long long)u))
METAL_CPU_INTEGER1(reverse_bits, __builtin_bitreverse64((unsigned long long)u) >> (64 - bits))
METAL_CPU_INTEGER2(absdiff, a > b ? U(a) - U(b) : U(b) - U(a))
METAL_CPU_INTEGER2(addsat, wide(a) + b > high ? high : wide(a) + b < low ? low : wide(a) + b)
METAL_CPU_INTEGER2(subsat, wide(a) - b > high ? high : wide(a) - b < low ? low : wide(a) - b)
METAL_CPU_INTEGER2(hadd, (wide(a) + b) >> 1)
METAL_CPU_INTEGER2(rhadd, (wide(a) + b + 1) >> 1)
METAL_CPU_INTEGER2(mulhi, (wide(a) * b) >> bits)
METAL_CPU_INTEGER2(
    rotate, U(U(a) << (U(b) & (bits - 1))) | U(U(a) >> ((bits - (U(b) & (bits - 1))) & (bits - 1))))
METAL_CPU_INTEGER2(mul24, S(a) * S(b))
#undef METAL_CPU_INTEGER1
#undef METAL_CPU_INTEGER2
template <typename T>
METAL_CPU_INLINE detail::if_integer<T> madhi(T x, T y, T z) { return mulhi(x, y) + z; }
template <typename T>
METAL_CPU_INLINE detail::if_integer<T> mad24(T x, T y, T z) { return mul24(x, y) + z; }
template <typename T>
METAL_CPU_INLINE detail::if_integer<T> extract_bits(T x, uint offset, uint count) {
  return detail::each(
      [=](auto a) {
        typedef decltype(a) S;
        constexpr uint bits = sizeof(S) * 8;
        if (count == 0) return S(0);
        return S(S(make_unsigned_t<S>(a) << (bits - count - offset)) >> (bits - count));
      },
      x);
}
template <typename T>
METAL_CPU_INLINE detail::if_integer<T> insert_bits(T base, T insert, uint offset, uint count) {
  return detail::each(
      [=](auto a, auto b) {
        typedef make_unsigned_t<decltype(a)> U;
        const U mask = U((count >= sizeof(U) * 8 ? U(~U(0)) : U((U(1) << count) - 1)) << offset);
        return decltype(a)((U(a) & ~mask) | (U(U(b) << offset) & mask));
      },
      base, insert);
}

// ---- vectors ----

template <int N>
METAL_CPU_INLINE bool any(vec<bool, N> v) {
  for (int i = 0; i < N; ++i)
    if (v[i]) return true;
  return false;
}
template <int N>
METAL_CPU_INLINE bool all(vec<bool, N> v) {
  for (int i = 0; i < N; ++i)
    if (!v[i]) return false;
  return true;
}
METAL_CPU_INLINE bool any(bool v) { return v; }
METAL_CPU_INLINE bool all(bool v) { return v; }

// Two type parameters, so that swizzles are accepted.
template <typename X, typename Y>
METAL_CPU_INLINE detail::if_real<X, detail::scalar<X>> dot(const X& x, const Y& y) {
  static_assert(__is_same(detail::settled<X>, detail::settled<Y>), "dot of two different types");
  typedef detail::scalar<X> T;
  T sum = x[0] * y[0];
  for (int i = 1; i < detail::is_vec<X>::size; ++i) sum = T(sum + T(x[i] * y[i]));
  return sum;
}
template <typename X>
METAL_CPU_INLINE detail::scalar<X> length_squared(const X& x) { return dot(x, x); }
template <typename X>
METAL_CPU_INLINE detail::scalar<X> length(const X& x) { return sqrt(dot(x, x)); }
template <typename X, typename Y>
METAL_CPU_INLINE detail::scalar<X> distance(const X& x, const Y& y) {
  const detail::settled<X> difference = detail::settled<X>(x) - detail::settled<X>(y);
  return length(difference);
}
template <typename X>
METAL_CPU_INLINE detail::settled<X> normalize(const X& x) {
  return detail::settled<X>(x) * detail::settled<X>(rsqrt(dot(x, x)));
}
template <typename X, typename Y>
METAL_CPU_INLINE detail::settled<X> cross(const X& x, const Y& y) {
  const detail::settled<X> a = x, b = y;
  return detail::settled<X>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}

}  // namespace metal
