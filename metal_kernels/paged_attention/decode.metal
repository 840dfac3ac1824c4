// SPDX-License-Identifier: Apache-2.0
// Attention for few packed rows: decode, and drafts to verify, up to ROWS rows in all.
//
// A threadgroup takes one tile and one K/V head. Its simdgroups walk the context in strips of four
// neighbouring keys; a simdgroup's lanes share a row of K or V, so each row is loaded once, whole,
// for all packed query rows. Each simdgroup keeps a running softmax (Milakov & Gimelshein 2018,
// arXiv:1805.02867), merged at the end.

constant constexpr int STRIP = 4;  // divides every block size: a strip lies in one block

// Loads a lane's N neighbouring elements of a row; only D = 80 has lanes that reach past its end.
template <typename C, int D, int N>
inline void load_row(const device C* row, uint lane, thread float* elements) {
    const int first = int(lane) * N;
    if (D % 32 != 0) {
        UNROLLED for (int i = 0; i < N; i++) {
            elements[i] = first + i < D ? decode_element(row[first + i]) : 0.0f;
        }
    } else if (N % 4 == 0) {
        UNROLLED for (int i = 0; i < N; i += 4) {
            const metal::vec<C, 4> four = *(const device metal::vec<C, 4>*)(row + first + i);
            UNROLLED for (int j = 0; j < 4; j++) {
                elements[i + j] = decode_element(four[j]);
            }
        }
    } else if (N % 2 == 0) {
        UNROLLED for (int i = 0; i < N; i += 2) {
            const metal::vec<C, 2> two = *(const device metal::vec<C, 2>*)(row + first + i);
            elements[i] = decode_element(two[0]);
            elements[i + 1] = decode_element(two[1]);
        }
    } else {
        UNROLLED for (int i = 0; i < N; i++) {
            elements[i] = decode_element(row[first + i]);
        }
    }
}

// The four keys of a strip, or their values, decoded; zeros past the end of the range.
template <typename C, int D, int N, bool SCALED>
inline void load_strip(
    const device C* pool,
    const device bfloat16_t* scales,
    ulong slot,
    int present,
    uint lane,
    thread float (&strip)[STRIP][N]) {
    UNROLLED for (int k = 0; k < STRIP; k++) {
        if (k < present) {
            load_row<C, D, N>(pool + (slot + k) * D, lane, strip[k]);
            if (SCALED) {
                const float scale = float(scales[slot + k]);
                UNROLLED for (int i = 0; i < N; i++) {
                    strip[k][i] *= scale;
                }
            }
        } else {
            UNROLLED for (int i = 0; i < N; i++) {
                strip[k][i] = 0.0f;
            }
        }
    }
}

// ---- kernel body
// Template: T, C, O, dtypes of queries, pool and output; D, head size; SCALED, whether the pool holds
// codes; PARTIAL, whether contexts are split; ROWS; SIMDGROUPS. Grid: (32 * SIMDGROUPS * tiles, Hkv).
threadgroup float merged[SIMDGROUPS * D];
threadgroup float stats[ROWS * SIMDGROUPS * 2];
if (thread_position_in_grid.x == 0 && thread_position_in_grid.y == 0) {
    for (int i = 0; i < 8; i++) {
        fence[i] = after[0];
    }
}

constexpr int N = (D + 31) / 32;  // elements of a row that a lane holds
const uint kv_head = threadgroup_position_in_grid.y;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const device Tile& tile = ((const device Tile*)tiles)[threadgroup_position_in_grid.x];
if (tile.packed_count == 0) {
    return;  // the whole threadgroup: no tile, but room for one
}
const device Request& request = ((const device Request*)requests)[tile.request];
const device Bounds& limits = *(const device Bounds*)bounds;
const device Scoring& factors = *(const device Scoring*)scoring;
const int num_heads = queries_shape[1];
const int group = num_heads / key_pool_shape[0];
const int count = tile.packed_count;
const int end = metal::min(tile.end, request.length);
const int window = limits.window;
const float cap = factors.cap;

float q[ROWS][N];
float acc[ROWS][N];
float top[ROWS];
float total[ROWS];
int position[ROWS];
UNROLLED for (int r = 0; r < ROWS; r++) {
    const int packed = tile.packed_begin + metal::min(r, count - 1);
    const int row = packed / group;
    const int head = int(kv_head) * group + packed % group;
    const ulong place = ulong(request.first_row + row) * num_heads + head;
    load_row<T, D, N>(queries + place * D, lane, q[r]);
    UNROLLED for (int i = 0; i < N; i++) {
        q[r][i] *= factors.scale;
        acc[r][i] = 0.0f;
    }
    position[r] = request.first_position + row;
    // A sink is a key of weight without value; one simdgroup starts from it.
    const bool first = tile.split == 0 && simdgroup == 0;
    top[r] = first ? metal::max(float(sinks[head]) * LOG2_E, LOWEST) : LOWEST;
    total[r] = top[r] > LOWEST ? 1.0f : 0.0f;
}

const Context context(
    key_pool_shape, kv_head, block_tables + ulong(tile.request) * uint(block_tables_shape[1]));
for (int base = tile.begin + int(simdgroup) * STRIP; base < end; base += SIMDGROUPS * STRIP) {
    const ulong slot = context.slot(base);
    const int present = metal::min(STRIP, end - base);
    float strip[STRIP][N];
    float4 weights[ROWS];
    load_strip<C, D, N, SCALED>(key_pool, key_scales, slot, present, lane, strip);
    UNROLLED for (int r = 0; r < ROWS; r++) {
        float4 score = float4(0.0f);
        UNROLLED for (int k = 0; k < STRIP; k++) {
            UNROLLED for (int i = 0; i < N; i++) {
                score[k] += q[r][i] * strip[k][i];
            }
        }
        score = metal::simd_sum(score);
        float next = top[r];
        UNROLLED for (int k = 0; k < STRIP; k++) {
            const int key = base + k;
            const bool seen = key <= position[r] && position[r] - key < window;
            score[k] = seen ? score_of(score[k], cap) : LOWEST;
            next = metal::max(next, score[k]);
        }
        const float rescale = metal::exp2(top[r] - next);
        float sum = 0.0f;
        UNROLLED for (int k = 0; k < STRIP; k++) {
            weights[r][k] = score[k] > LOWEST ? metal::exp2(score[k] - next) : 0.0f;
            sum += weights[r][k];
        }
        total[r] = total[r] * rescale + sum;
        top[r] = next;
        UNROLLED for (int i = 0; i < N; i++) {
            acc[r][i] *= rescale;
        }
    }
    load_strip<C, D, N, SCALED>(value_pool, value_scales, slot, present, lane, strip);
    UNROLLED for (int r = 0; r < ROWS; r++) {
        UNROLLED for (int k = 0; k < STRIP; k++) {
            UNROLLED for (int i = 0; i < N; i++) {
                acc[r][i] += weights[r][k] * strip[k][i];
            }
        }
    }
}

UNROLLED for (int r = 0; r < ROWS; r++) {
    if (lane == 0) {
        stats[(r * SIMDGROUPS + int(simdgroup)) * 2] = top[r];
        stats[(r * SIMDGROUPS + int(simdgroup)) * 2 + 1] = total[r];
    }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
UNROLLED for (int r = 0; r < ROWS; r++) {
    if (r >= count) {
        break;  // the same for the whole threadgroup
    }
    float all_top = LOWEST;
    for (int s = 0; s < SIMDGROUPS; s++) {
        all_top = metal::max(all_top, stats[(r * SIMDGROUPS + s) * 2]);
    }
    float all_total = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
        const int at = (r * SIMDGROUPS + s) * 2;
        all_total += stats[at + 1] * metal::exp2(stats[at] - all_top);
    }
    const float rescale = metal::exp2(top[r] - all_top);
    UNROLLED for (int i = 0; i < N; i++) {
        const int d = int(lane) * N + i;
        if (D % 32 == 0 || d < D) {
            merged[int(simdgroup) * D + d] = acc[r][i] * rescale;
        }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const int packed = tile.packed_begin + r;
    const int row = request.first_out_row + packed / group * tile.parts + tile.split;
    const ulong place = ulong(row) * num_heads + int(kv_head) * group + packed % group;
    for (int d = int(simdgroup * 32 + lane); d < D; d += SIMDGROUPS * 32) {
        float sum = 0.0f;
        for (int s = 0; s < SIMDGROUPS; s++) {
            sum += merged[s * D + d];
        }
        out[place * D + d] = O(PARTIAL ? sum : sum / all_total);
    }
    if (PARTIAL && simdgroup == 0 && lane == 0) {
        out_stats[place * 2] = all_top;
        out_stats[place * 2 + 1] = all_total;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
