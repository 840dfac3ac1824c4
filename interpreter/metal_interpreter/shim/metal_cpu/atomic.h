// SPDX-License-Identifier: Apache-2.0
// Atomics: relaxed only, as in MSL before 3.2.
#pragma once

#include "types.h"

namespace metal {

enum memory_order { memory_order_relaxed = 0 };
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

template <typename T>
struct atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, float) ||
                    __is_same(T, bool) || __is_same(T, ulong),
                "Metal has atomics of int, uint, ulong, float and bool");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

namespace detail {
// The compiler's atomics are for integers; a float is passed as its bits.
template <typename T>
struct atomic_bits {
  typedef T type;
};
template <>
struct atomic_bits<float> {
  typedef uint type;
};
template <>
struct atomic_bits<bool> {
  typedef uint8_t type;
};
template <typename T>
using bits = typename atomic_bits<T>::type;
template <typename T, typename A>
METAL_CPU_INLINE bits<T>* address(A* object) {
  return reinterpret_cast<bits<T>*>(const_cast<T*>(&object->value));
}

/// Sets new = f(old); returns old.
template <typename T, typename A, typename F>
METAL_CPU_INLINE T update(A* object, F f) {
  bits<T>* at = address<T>(object);
  bits<T> old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, as_type<bits<T>>(T(f(as_type<T>(old)))), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return as_type<T>(old);
}
template <typename A>
struct atomic_value;
template <typename T>
struct atomic_value<atomic<T>> {
  typedef T type;
};
template <typename A>
using value_of = typename atomic_value<remove_cv_t<A>>::type;
}  // namespace detail

template <typename A, typename T = detail::value_of<A>>
METAL_CPU_INLINE T atomic_load_explicit(A* object, memory_order) {
  return as_type<T>(__atomic_load_n(detail::address<T>(object), __ATOMIC_RELAXED));
}
template <typename A, typename T = detail::value_of<A>>
METAL_CPU_INLINE void atomic_store_explicit(A* object, detail::value_of<A> value, memory_order) {
  __atomic_store_n(detail::address<T>(object), as_type<detail::bits<T>>(value), __ATOMIC_RELAXED);
}
template <typename A, typename T = detail::value_of<A>>
METAL_CPU_INLINE T atomic_exchange_explicit(A* object, detail::value_of<A> value, memory_order) {
  return as_type<T>(__atomic_exchange_n(detail::address<T>(object),
                                        as_type<detail::bits<T>>(value), __ATOMIC_RELAXED));
}
template <typename A, typename T = detail::value_of<A>>
METAL_CPU_INLINE bool atomic_compare_exchange_weak_explicit(
    A* object, thread detail::value_of<A>* expected, detail::value_of<A> desired, memory_order,
    memory_order) {
  return __atomic_compare_exchange_n(
      detail::address<T>(object), reinterpret_cast<detail::bits<T>*>(expected),
      as_type<detail::bits<T>>(desired), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define METAL_CPU_FETCH(name, expression)                                                   \
  template <typename A, typename T = detail::value_of<A>>                                   \
  METAL_CPU_INLINE T atomic_fetch_##name##_explicit(A* object, detail::value_of<A> operand, \
                                                    memory_order) {                         \
    return detail::update<T>(object, [=](T old) { return expression; });                    \
  }
METAL_CPU_FETCH(add, T(old + operand))
METAL_CPU_FETCH(sub, T(old - operand))
METAL_CPU_FETCH(and, T(old & operand))
METAL_CPU_FETCH(or, T(old | operand))
METAL_CPU_FETCH(xor, T(old ^ operand))
METAL_CPU_FETCH(max, old < operand ? operand : old)
METAL_CPU_FETCH(min, operand < old ? operand : old)
#undef METAL_CPU_FETCH

}  // namespace metal
