// SPDX-License-Identifier: Apache-2.0
// Attention for few packed rows: decode, and verification of drafts, with the same arithmetic.
//
// A threadgroup computes one tile and one K/V head, ROW_GROUPS * 8 packed rows, and reads K and V directly
// from device memory: S^T = K Q^T and O = P V by 8x8 matrices whose rows are keys. A lane's 16 bytes of a
// row of K or V are elements of several matrices as they are: the order of elements within a head is free
// if Q has the same, and V's is undone in the output. SPLIT simdgroups share a head; they
// sum their parts of the scores through threadgroup memory.
//
// The context is divided into walks, WALKS for a whole one and PART_WALKS for a part: strips of STRIPS * 8 keys,
// counted from position 0, are dealt to the walks in turn. Each walk has a running softmax (Milakov & Gimelshein
// 2018, arXiv:1805.02867), and walks are joined in order. WALKERS simdgroups walk in parallel, and take further
// walks in sequence, so that a row's result does not depend on the number of other rows in its tile.

// Score of a key that a row does not see: its weight is 0 even if the largest score is LOWEST.
constant constexpr float UNSEEN = -3.4e38f;

// Type of Q's matrices: that of the queries if it can hold K's values, else float.
template <typename T, typename K>
struct QueryElement {
    typedef float Element;
};

template <typename T>
struct QueryElement<T, T> {
    typedef T Element;
};

typedef metal::simdgroup_matrix<float, 8, 8> Sums;

template <typename M, typename Pair>
inline void fill(thread metal::simdgroup_matrix<M, 8, 8>& matrix, Pair elements) {
    matrix.thread_elements()[0] = elements[0];
    matrix.thread_elements()[1] = elements[1];
}

// Location of this lane's element (column, row) of a matrix's transpose: the lane, and whether it is
// the second of its two. The adjacent element is two lanes further.
struct Transposed {
    ushort lane;
    bool is_second;

    Transposed(Place place) {
        lane = ushort((place.column & 4) << 2 | (place.column & 2) << 1 | (place.row & 4) << 1 | place.row / 2 % 2);
        is_second = place.row % 2 != 0;
    }

    float get(float first, float second, int beside) const {
        const ushort from = lane + ushort(2 * beside);
        const float even = metal::simd_shuffle(first, from);
        const float odd = metal::simd_shuffle(second, from);
        return is_second ? odd : even;
    }
};

// Reduces over the rows of a matrix, for each column.
inline float column_max(float value) {
    value = metal::max(value, metal::simd_shuffle_xor(value, 2));
    value = metal::max(value, metal::simd_shuffle_xor(value, 4));
    return metal::max(value, metal::simd_shuffle_xor(value, 16));
}

inline float column_sum(float value) {
    value += metal::simd_shuffle_xor(value, 2);
    value += metal::simd_shuffle_xor(value, 4);
    return value + metal::simd_shuffle_xor(value, 16);
}

// A simdgroup's part of a head: CHUNKS runs of 16 bytes for each of a row's four lanes.
template <typename C, int SIZE, int SPLIT>
struct Part {
    static constant constexpr int WIDE = 16 / int(sizeof(C));  // elements in 16 bytes
    static constant constexpr int RUN = 4 * WIDE;
    static constant constexpr int CHUNKS = ((SIZE + RUN - 1) / RUN + SPLIT - 1) / SPLIT;

    // First element of a lane's 16 bytes of a chunk; past the end of the row if the head has no more.
    static inline int element(int part, int chunk, int column) {
        return (part * CHUNKS + chunk) * RUN + column / 2 * WIDE;
    }

    // A lane's 16 bytes of each chunk; past the row's end, bytes from its beginning.
    static inline void load(const device C* row, int part, int column, thread uint4 (&raw)[CHUNKS]) {
        UNROLLED for (int h = 0; h < CHUNKS; h++) {
            const int at = element(part, h, column);
            const bool there = SIZE % (RUN * SPLIT) == 0 || at < SIZE;
            raw[h] = *(const device uint4*)(row + (there ? at : 0));
        }
    }
};

// ---- kernel body
// Template: T, C, O, dtypes of queries, pool and output; D and DV, sizes of keys and values; LATENT, whether
// values are the first elements of keys; SCALED, whether the pool is quantized; CAPPED, whether scores have
// a soft cap; BIASED, whether scores have a bias by distance; PARTIAL, whether contexts are split; ROW_GROUPS, SPLIT,
// WALKS, PART_WALKS, WALKERS, STRIPS.
// Grid: (32 * ROW_GROUPS * WALKERS * SPLIT * tiles, Hkv).
typedef Fragments<C> Of;
typedef typename Of::Element M;
typedef typename QueryElement<T, M>::Element Q;
typedef Part<C, LATENT ? DV : D, SPLIT> Keys;
typedef Part<C, DV, SPLIT> Values;
constexpr int SIMDGROUPS = ROW_GROUPS * WALKERS * SPLIT;
constexpr int KEYS = STRIPS * 8;  // per step of a walk
constexpr int AT_ONCE = SPLIT > 4 ? 4 : SPLIT;  // parts of a score that fit in registers
// For latents, 8 rotated elements per simdgroup, which values lack.
constexpr int QM = Keys::CHUNKS * Of::COUNT + (LATENT ? 1 : 0);
constexpr int VM = Values::CHUNKS * Of::COUNT;
threadgroup float2 exchanged[SPLIT > 1 ? 2 * SIMDGROUPS * STRIPS * 32 : 1];
threadgroup float joined[WALKS > 1 ? ROW_GROUPS * SPLIT * (VM + 1) * 64 : 1];
if (thread_position_in_grid.x == 0 && thread_position_in_grid.y == 0) {
    for (int i = 0; i < 8; i++) {
        fence[i] = after[0];
    }
}

const uint kv_head = threadgroup_position_in_grid.y;
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const device Tile& tile = ((const device Tile*)tiles)[threadgroup_position_in_grid.x];
if (tile.packed_count == 0) {
    return;  // the whole threadgroup: padding, no tile
}
const device Request& request = ((const device Request*)requests)[tile.request];
const device Scoring& settings = *(const device Scoring*)scoring;
const int num_heads = queries_shape[1];
const int group = num_heads / key_pool_shape[0];
const int window = settings.window;
const float scale = settings.scale * unit<C>();
const float cap = settings.cap;
const int extent = settings.extent;
// Rows of several requests that share a prefix: each has its own Request, and all leave
// partial results. Sinks are counted with the rest of each row's context.
const bool listed = PARTIAL && settings.listed != 0;
const int part = simdgroup % SPLIT;
const int walker = simdgroup / SPLIT % WALKERS;
const int row_group = simdgroup / (SPLIT * WALKERS);
const Place place(thread_index_in_simdgroup);
const Transposed transposed(place);

// Range of keys visible to rows of the tile.
const int oldest = request.first_position + tile.packed_begin / group;
const int first = metal::max(tile.begin, oldest - window + 1);
const int end = metal::min(tile.end, request.length);

// Q transposed: two packed rows per lane, as columns. Rows past the tile's last repeat it.
metal::simdgroup_matrix<Q, 8, 8> q[QM];
int first_seen[2];  // of each row, less this lane's index among a strip's keys
uint num_seen[2];
int own[2];  // position of each row, less this lane's index among a strip's keys
const device T* biases[2];
float sink[2];
UNROLLED for (int e = 0; e < 2; e++) {
    const int in_tile = row_group * 8 + place.column + e;
    const int packed = tile.packed_begin + metal::min(in_tile, tile.packed_count - 1);
    const int head = int(kv_head) * group + packed % group;
    const int position = request.first_position + packed / group;
    const int oldest_seen = metal::max(tile.begin, position - window + 1);
    first_seen[e] = oldest_seen - place.row;
    own[e] = position - place.row;
    const int past = settings.bidirectional != 0 ? end : metal::min(end, position + 1);
    num_seen[e] = uint(metal::max(past - oldest_seen, 0));
    sink[e] = tile.split == 0 && !listed ? metal::max(float(sinks[head]) * LOG2_E, LOWEST) : LOWEST;
    const int row = packed / group;
    const int query_row = listed ? (&request)[row].first_row : request.first_row + row;
    const device T* query = queries + (ulong(query_row) * num_heads + head) * D;
    biases[e] = bias + (BIASED ? (ulong(query_row) * num_heads + head) * uint(extent) : 0);
    UNROLLED for (int m = 0; m < Keys::CHUNKS * Of::COUNT; m++) {
        const int d = Keys::element(part, m / Of::COUNT, place.row & 6) + Of::at(m % Of::COUNT, place.row % 2);
        q[m].thread_elements()[e] = LATENT || d < D ? Q(query[d]) : Q(0.0f);
    }
    if (LATENT) {
        q[QM - 1].thread_elements()[e] = Q(query[DV + part * 8 + place.row]);
    }
}

const Context context(
    key_pool_shape,
    kv_head,
    block_tables + ulong(listed ? tile.table : tile.request) * uint(block_tables_shape[1]));
const int walks = PARTIAL && tile.parts > 1 ? PART_WALKS : WALKS;  // a power of two
const int first_strip = first / KEYS & -walks;
const int strips = end > first ? (end - 1) / KEYS - first_strip + 1 : 0;
Sums acc[VM];
float row_top;  // for this lane's packed row, like `acc`
float row_total;
int turn = 0;  // selects one half of `exchanged`
for (int lap = 0; lap < walks; lap += WALKERS) {
    const int walk = lap + walker;
    // A sink is a key with weight but no value; one walk starts from it. Sums cover this lane's keys.
    float top[2];
    float total[2];
    UNROLLED for (int e = 0; e < 2; e++) {
        top[e] = walk == 0 ? sink[e] : LOWEST;
        total[e] = top[e] > LOWEST && place.row == 0 ? 1.0f : 0.0f;
    }
    UNROLLED for (int m = 0; m < VM; m++) {
        acc[m] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int strip = lap; strip < strips; strip += walks) {
        const int base = (first_strip + strip + walker) * KEYS;
        uint4 keys[STRIPS][Keys::CHUNKS];
        uint4 values[STRIPS][Values::CHUNKS];
        typename Of::Pair rotated[STRIPS];
        float key_scale[STRIPS];
        float value_scale[STRIPS];
        UNROLLED for (int s = 0; s < STRIPS; s++) {
            // Loads are unconditional: invisible keys repeat the ones at the edge.
            const ulong slot = context.slot(metal::clamp(base + s * 8 + place.row, first, end - 1));
            const device C* row = key_pool + slot * D;
            Keys::load(row, part, place.column, keys[s]);
            if (LATENT) {
                rotated[s] =
                    *(const device typename Of::Pair*)(row + DV + part * 8 + place.column);
            } else {
                Values::load(value_pool + slot * DV, part, place.column, values[s]);
            }
            key_scale[s] = SCALED ? float(key_scales[slot]) : 1.0f;
            value_scale[s] = LATENT ? key_scale[s] : SCALED ? float(value_scales[slot]) : 1.0f;
        }

        Sums score[STRIPS];
        UNROLLED for (int s = 0; s < STRIPS; s++) {
            score[s] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            UNROLLED for (int m = 0; m < QM; m++) {
                metal::simdgroup_matrix<M, 8, 8> k;
                const bool is_rotated = LATENT && m == QM - 1;
                const int h = is_rotated ? 0 : m / Of::COUNT;
                fill(k, is_rotated ? Of::of_pair(rotated[s]) : Of::cut(keys[s][h], m % Of::COUNT));
                metal::simdgroup_multiply_accumulate(score[s], k, q[m], score[s]);
            }
        }
        if (SPLIT > 1) {
            threadgroup float2* sums = exchanged + turn * (SIMDGROUPS * STRIPS * 32) + lane;
            UNROLLED for (int s = 0; s < STRIPS; s++) {
                float2 mine;
                mine[0] = score[s].thread_elements()[0];
                mine[1] = score[s].thread_elements()[1];
                sums[(simdgroup * STRIPS + s) * 32] = mine;
            }
            metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
            UNROLLED for (int s = 0; s < STRIPS; s++) {
                const threadgroup float2* parts = sums + ((simdgroup - part) * STRIPS + s) * 32;
                float2 sum = 0.0f;
                ROLLED for (int p = 0; p < SPLIT; p += AT_ONCE) {
                    UNROLLED for (int i = 0; i < AT_ONCE; i++) {
                        sum += parts[(p + i) * STRIPS * 32];
                    }
                }
                score[s].thread_elements()[0] = sum[0];
                score[s].thread_elements()[1] = sum[1];
            }
            turn = 1 - turn;
        }

        // Running softmax over the columns.
        float rescale[2];
        UNROLLED for (int e = 0; e < 2; e++) {
            float next = top[e];
            UNROLLED for (int s = 0; s < STRIPS; s++) {
                float value = score[s].thread_elements()[e] * (key_scale[s] * scale);
                value = CAPPED ? capped(value, cap) : value;
                if (BIASED) {
                    const int distance = own[e] - (base + s * 8);
                    const float added = float(biases[e][metal::clamp(distance, 0, extent - 1)]);
                    value += distance < extent ? added * LOG2_E : 0.0f;
                }
                const bool seen = uint(base + s * 8 - first_seen[e]) < num_seen[e];
                value = seen ? value : UNSEEN;
                score[s].thread_elements()[e] = value;
                next = metal::max(next, value);
            }
            next = column_max(next);
            rescale[e] = metal::fast::exp2(top[e] - next);
            top[e] = next;
            total[e] *= rescale[e];
            UNROLLED for (int s = 0; s < STRIPS; s++) {
                const float weight = metal::fast::exp2(score[s].thread_elements()[e] - next);
                total[e] += weight;
                score[s].thread_elements()[e] = weight * value_scale[s];
            }
        }
        const float factor = transposed.get(rescale[0], rescale[1], 0);
        UNROLLED for (int m = 0; m < VM; m++) {
            acc[m].thread_elements()[0] *= factor;
            acc[m].thread_elements()[1] *= factor;
        }
        UNROLLED for (int s = 0; s < STRIPS; s++) {
            Sums weights;  // packed rows by keys
            UNROLLED for (int e = 0; e < 2; e++) {
                weights.thread_elements()[e] = transposed.get(
                    score[s].thread_elements()[0], score[s].thread_elements()[1], e);
            }
            UNROLLED for (int m = 0; m < VM; m++) {
                const uint4 raw = LATENT ? keys[s][m / Of::COUNT] : values[s][m / Of::COUNT];
                metal::simdgroup_matrix<M, 8, 8> v;
                fill(v, Of::cut(raw, m % Of::COUNT));
                metal::simdgroup_multiply_accumulate(acc[m], weights, v, acc[m]);
            }
        }
    }

    // Join the walk's part to those of earlier walks.
    row_top = transposed.get(top[0], top[1], 0);
    row_total = transposed.get(column_sum(total[0]), column_sum(total[1]), 0);
    for (int next = 0; next < WALKERS; next++) {
        if (walker == next) {
            threadgroup float* before = joined + (row_group * SPLIT + part) * ((VM + 1) * 64) + lane * 2;
            if (WALKS > 1 && walk > 0) {
                const float both = metal::max(before[0], row_top);
                const float theirs = metal::fast::exp2(before[0] - both);
                const float mine = metal::fast::exp2(row_top - both);
                row_total = before[1] * theirs + row_total * mine;
                row_top = both;
                UNROLLED for (int m = 0; m < VM; m++) {
                    UNROLLED for (int e = 0; e < 2; e++) {
                        const float value = acc[m].thread_elements()[e] * mine;
                        acc[m].thread_elements()[e] = before[(m + 1) * 64 + e] * theirs + value;
                    }
                }
            }
            if (walk < walks - 1) {
                before[0] = row_top;
                before[1] = row_total;
                UNROLLED for (int m = 0; m < VM; m++) {
                    before[(m + 1) * 64] = acc[m].thread_elements()[0];
                    before[(m + 1) * 64 + 1] = acc[m].thread_elements()[1];
                }
            }
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
}

// The last walk now has the result of all.
if (walker == WALKERS - 1 && row_group * 8 + place.row < tile.packed_count) {
    const int packed = tile.packed_begin + row_group * 8 + place.row;
    const int row = request.first_out_row + packed / group * tile.parts + tile.split;
    const ulong at = ulong(row) * num_heads + int(kv_head) * group + packed % group;
    const float share = PARTIAL ? unit<C>() : unit<C>() / row_total;
    UNROLLED for (int m = 0; m < VM; m++) {
        UNROLLED for (int e = 0; e < 2; e++) {
            const int d = Values::element(part, m / Of::COUNT, place.column) + Of::at(m % Of::COUNT, e);
            if (DV % (Values::RUN * SPLIT) == 0 || d < DV) {
                out[at * DV + d] = O(acc[m].thread_elements()[e] * share);
            }
        }
    }
    if (PARTIAL && part == 0 && place.column == 0) {
        out_stats[at * 2] = row_top;
        out_stats[at * 2 + 1] = row_total;
    }
}
