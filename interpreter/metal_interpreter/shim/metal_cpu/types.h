// SPDX-License-Identifier: Apache-2.0
// Scalar types, address spaces and type traits of the Metal Shading Language (MSL).
#pragma once

// Memory is flat here, except in the pass that checks address spaces (strict.py).
#if defined(METAL_CPU_ADDRESS_SPACES)
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif
#define thread
#define kernel

// Functions of the shim must be inlined: call sites distinguish synchronization points.
// Without lines of their own, they appear in messages as the line that calls them.
#define METAL_CPU_INLINE __attribute__((always_inline, nodebug)) inline

typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef unsigned long uint64_t;
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef long int64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

static_assert(sizeof(long) == 8 && sizeof(int) == 4, "Metal's long has 64 bits, its int 32");

namespace metal {

typedef ::size_t size_t;

// ---- traits ----

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <typename A, typename B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <typename A, typename B>
inline constexpr bool is_same_v = __is_same(A, B);

template <bool b, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool b, typename T = void>
using enable_if_t = typename enable_if<b, T>::type;

template <bool b, typename A, typename B>
struct conditional {
  typedef A type;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool b, typename A, typename B>
using conditional_t = typename conditional<b, A, B>::type;

template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
struct remove_cv {
  typedef remove_cv_t<T> type;
};
template <typename T>
struct remove_reference {
  typedef remove_reference_t<T> type;
};

}  // namespace metal

// ---- bfloat ----

#if defined(METAL_CPU_ADDRESS_SPACES)
typedef __bf16 bfloat;
#else
/// The upper half of a float. As in MSL 3.1, it converts to a float implicitly, but a float to it
/// only explicitly.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  /// Rounds to nearest even, as Apple's conversions do; NaN stays NaN.
  METAL_CPU_INLINE explicit bfloat(float x) {
    const uint32_t u = __builtin_bit_cast(uint32_t, x);
    bits = x != x ? uint16_t(u >> 16 | 0x40) : uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  }
  template <typename T, typename = metal::enable_if_t<__is_arithmetic(T) && !__is_same(T, float)>>
  METAL_CPU_INLINE explicit bfloat(T x) : bfloat(float(x)) {}

  METAL_CPU_INLINE operator float() const {
    return __builtin_bit_cast(float, uint32_t(bits) << 16);
  }

  METAL_CPU_INLINE friend bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
  METAL_CPU_INLINE friend bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
  METAL_CPU_INLINE friend bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a) * float(b)); }
  METAL_CPU_INLINE friend bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a) / float(b)); }
  METAL_CPU_INLINE friend bfloat operator-(bfloat a) { return bfloat(-float(a)); }
  METAL_CPU_INLINE bfloat& operator+=(bfloat b) { return *this = *this + b; }
  METAL_CPU_INLINE bfloat& operator-=(bfloat b) { return *this = *this - b; }
  METAL_CPU_INLINE bfloat& operator*=(bfloat b) { return *this = *this * b; }
  METAL_CPU_INLINE bfloat& operator/=(bfloat b) { return *this = *this / b; }
};
#endif

namespace metal {

template <typename T>
inline constexpr bool is_floating_point_v =
    __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
template <typename T>
inline constexpr bool is_integral_v = __is_integral(T);
template <typename T>
inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <typename T>
inline constexpr bool is_signed_v = is_floating_point_v<T> || T(-1) < T(0);
template <typename T>
inline constexpr bool is_unsigned_v = !is_signed_v<T>;
template <typename T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <typename T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <typename T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <typename T>
struct is_signed : bool_constant<is_signed_v<T>> {};
template <typename T>
struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <typename T>
struct make_unsigned {
  typedef __make_unsigned(T) type;
};
template <typename T>
using make_unsigned_t = __make_unsigned(T);
template <typename T>
struct make_signed {
  typedef __make_signed(T) type;
};
template <typename T>
using make_signed_t = __make_signed(T);

// ---- limits ----

template <typename T>
struct numeric_limits {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = is_signed_v<T>;
  static constexpr bool is_integer = true;
  static constexpr int digits = int(sizeof(T)) * 8 - is_signed;
  static constexpr T max() { return is_signed ? T(~(1ULL << (sizeof(T) * 8 - 1))) : T(~0ULL); }
  static constexpr T min() { return T(~max()); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};
template <>
struct numeric_limits<float> {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false;
  static constexpr int digits = 24;
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <>
struct numeric_limits<half> {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false;
  static constexpr int digits = 11;
  static constexpr half max() { return half(65504.0f); }
  static constexpr half min() { return half(0x1p-14f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half epsilon() { return half(0x1p-10f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bool is_specialized = true, is_signed = true, is_integer = false;
  static constexpr int digits = 8;
  static constexpr bfloat of(uint16_t bits) { return __builtin_bit_cast(bfloat, bits); }
  static constexpr bfloat max() { return of(0x7F7F); }
  static constexpr bfloat min() { return of(0x0080); }
  static constexpr bfloat lowest() { return of(0xFF7F); }
  static constexpr bfloat epsilon() { return of(0x3C00); }
  static constexpr bfloat infinity() { return of(0x7F80); }
  static constexpr bfloat quiet_NaN() { return of(0x7FC0); }
};

/// Reinterprets the bits as another type of the same size.
template <typename To, typename From>
METAL_CPU_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  To to;
  __builtin_memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

}  // namespace metal

// Suffix of 1.0h. (Clang does not allow the suffix bf.)
METAL_CPU_INLINE constexpr half operator""h(long double x) { return half(x); }

// as_type is a keyword-like function in Metal, found without `metal::`.
using metal::as_type;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2U + 1U)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT2_F 1.41421356237309504880f
