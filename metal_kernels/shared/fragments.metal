// SPDX-License-Identifier: Apache-2.0
// Converts bytes of a pool to elements of 8x8 matrices. A lane holds two elements of each; 16 bytes of
// a row fill COUNT matrices, with elements in the cheapest order, which `at` returns.

template <typename C>
struct Fragments {
    typedef C Element;
    typedef uint Pair;  // two neighboring elements
    static constant constexpr int COUNT = 4;

    // Index among the 16 bytes' elements of element e of matrix i.
    static inline int at(int i, int e) {
        return i * 2 + e;
    }
    static inline metal::vec<C, 2> of_pair(Pair pair) {
        return as_type<metal::vec<C, 2>>(pair);
    }
    static inline metal::vec<C, 2> cut(uint4 raw, int i) {
        return of_pair(raw[i]);
    }
};

template <>
struct Fragments<float> {
    typedef float Element;
    typedef uint2 Pair;
    static constant constexpr int COUNT = 2;

    static inline int at(int i, int e) {
        return i * 2 + e;
    }
    static inline float2 of_pair(Pair pair) {
        return as_type<float2>(pair);
    }
    static inline float2 cut(uint4 raw, int i) {
        Pair pair;
        pair[0] = raw[i * 2];
        pair[1] = raw[i * 2 + 1];
        return of_pair(pair);
    }
};

// Quantized values become halves in pairs within their words: the first and third, and the
// second and fourth. So of 16 values, element e of matrix i is:
inline int code_at(int i, int e) {
    return i / 2 * 4 + i % 2 + e * 2;
}

// A word whose first and third values form a pair.
inline uint spread(ushort pair) {
    return uint(pair) | uint(pair) << 8;
}

// fp8, with its exponent at the low end of a half's: 2^-8 of the actual values.
template <>
struct Fragments<uint8_t> {
    typedef half Element;
    typedef ushort Pair;
    static constant constexpr int COUNT = 8;

    static inline int at(int i, int e) {
        return code_at(i, e);
    }
    static inline half2 upper(uint codes) {  // the second and the fourth
        return as_type<half2>(as_type<uint>(as_type<short2>(codes) >> short2(1)) & 0xbf80bf80u);
    }
    static inline half2 of_pair(Pair pair) {
        return upper(spread(pair) << 8);
    }
    static inline half2 cut(uint4 raw, int i) {
        return upper(i % 2 == 0 ? raw[i / 2] << 8 : raw[i / 2]);
    }
};

// int8: with its sign inverted, it is the last byte of a half that is larger by 1152.
template <>
struct Fragments<int8_t> {
    typedef half Element;
    typedef ushort Pair;
    static constant constexpr int COUNT = 8;

    static inline int at(int i, int e) {
        return code_at(i, e);
    }
    static inline half2 lower(uint codes) {  // bytes 0 and 2
        return as_type<half2>((codes & 0x00ff00ffu) ^ 0x64806480u) - half2(half(1152.0f));
    }
    static inline half2 of_pair(Pair pair) {
        return lower(spread(pair));
    }
    static inline half2 cut(uint4 raw, int i) {
        return lower(i % 2 == 0 ? raw[i / 2] : raw[i / 2] >> 8);
    }
};

// Factor of a cache's elements, in addition to their row's scale.
template <typename C>
inline float unit() {
    return 1.0f;
}

template <>
inline float unit<uint8_t>() {
    return 256.0f;
}
