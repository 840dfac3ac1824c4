// SPDX-License-Identifier: Apache-2.0
// Attention for many packed rows: prefill, many drafts to verify, and latent (MLA) attention.
//
// A threadgroup computes one tile and one K/V head, ROW_GROUPS * 8 packed rows. It stages KEYS rows of
// K, then of V, decoded, in threadgroup memory, each loaded once for all its query rows. A
// simdgroup owns eight packed rows and one of SPLIT ranges of the head size: its part of Q and of
// the output stays in registers as 8x8 matrices; with SPLIT > 1 the parts of the scores are summed
// through threadgroup memory. Tiled softmax after FlashAttention-2 (Dao 2023, arXiv:2307.08691).

typedef metal::simdgroup_matrix<float, 8, 8> Matrix;

// Stages rows [base, base + KEYS) of K or V into a tile with rows of STRIDE elements; zeros
// before `first` and from `end` on. All threads take part.
template <typename T, typename C, int D, int KEYS, int STRIDE, int THREADS, bool SCALED>
inline void stage(
    const device C* pool,
    const device bfloat16_t* scales,
    thread const Context& context,
    int row_size,
    int base,
    int first,
    int end,
    uint thread_index,
    threadgroup T* tile) {
    constexpr int WIDE = 4;  // divides every head size
    for (int chunk = int(thread_index); chunk < KEYS * (D / WIDE); chunk += THREADS) {
        const int key = chunk / (D / WIDE);
        const int d = chunk % (D / WIDE) * WIDE;
        threadgroup T* to = tile + key * STRIDE + d;
        if (base + key >= first && base + key < end) {
            const ulong slot = context.slot(base + key);
            const float scale = SCALED ? float(scales[slot]) : 1.0f;
            const metal::vec<C, WIDE> codes =
                *(const device metal::vec<C, WIDE>*)(pool + slot * row_size + d);
            UNROLLED for (int i = 0; i < WIDE; i++) {
                to[i] = T(decode_element(codes[i]) * scale);
            }
        } else {
            UNROLLED for (int i = 0; i < WIDE; i++) {
                to[i] = T(0.0f);
            }
        }
    }
}

// ---- kernel body
// Template: as in decode.metal, except ROW_GROUPS, SPLIT and KEYS.
// Grid: (32 * ROW_GROUPS * SPLIT * tiles, Hkv).
threadgroup T tile_memory[KEYS * (D + 16 / sizeof(T))];
threadgroup float score_memory[SPLIT > 1 ? ROW_GROUPS * SPLIT * 8 * KEYS : 1];
if (thread_position_in_grid.x == 0 && thread_position_in_grid.y == 0) {
    for (int i = 0; i < 8; i++) {
        fence[i] = after[0];
    }
}

constexpr int THREADS = ROW_GROUPS * SPLIT * 32;
constexpr int STRIDE = D + 16 / int(sizeof(T));  // rows start in different banks
constexpr int QM = D / SPLIT / 8;                // matrices of a simdgroup's part of a Q row
constexpr int OM = DV / SPLIT / 8;               // likewise of an output row
constexpr int SM = KEYS / 8;
const uint kv_head = threadgroup_position_in_grid.y;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const device Tile& tile = ((const device Tile*)tiles)[threadgroup_position_in_grid.x];
if (tile.packed_count == 0) {
    return;  // the whole threadgroup: padding, no tile
}
const device Request& request = ((const device Request*)requests)[tile.request];
const device Scoring& settings = *(const device Scoring*)scoring;
const int num_heads = queries_shape[1];
const int group = num_heads / key_pool_shape[0];
const int end = metal::min(tile.end, request.length);
const int window = settings.window;
// First key visible to any row of the tile.
const int first =
    metal::max(tile.begin, request.first_position + tile.packed_begin / group - window + 1);
const float cap = settings.cap;
const int extent = settings.extent;
const uint thread_index = simdgroup * 32 + lane;
const int row_group = int(simdgroup) / SPLIT;
const int part = int(simdgroup) % SPLIT;
const Place place(lane);

// This lane's packed row; rows past the tile's last repeat it and are not written.
const int in_tile = row_group * 8 + place.row;
const bool present = in_tile < tile.packed_count;
const int packed = tile.packed_begin + metal::min(in_tile, tile.packed_count - 1);
const int row = packed / group;
const int head = int(kv_head) * group + packed % group;
const int position = request.first_position + row;
const int newest = settings.bidirectional != 0 ? end - 1 : position;  // newest visible key

Matrix q[QM];
Matrix acc[OM];
const ulong row_of_head = ulong(request.first_row + row) * num_heads + head;
const device T* query = queries + row_of_head * D;
const device T* biases = bias + (BIASED ? row_of_head * uint(extent) : 0);
UNROLLED for (int m = 0; m < QM; m++) {
    const int d = part * (D / SPLIT) + m * 8 + place.column;
    q[m].thread_elements()[0] = float(query[d]) * settings.scale;
    q[m].thread_elements()[1] = float(query[d + 1]) * settings.scale;
}
UNROLLED for (int m = 0; m < OM; m++) {
    acc[m] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
// A sink is a key with weight but no value.
float top = tile.split == 0 ? metal::max(float(sinks[head]) * LOG2_E, LOWEST) : LOWEST;
float total = top > LOWEST ? 1.0f : 0.0f;

const Context context(
    key_pool_shape, kv_head, block_tables + ulong(tile.request) * uint(block_tables_shape[1]));
for (int base = tile.begin; base < end; base += KEYS) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all have read the previous V
    stage<T, C, D, KEYS, STRIDE, THREADS, SCALED>(
        key_pool, key_scales, context, D, base, first, end, thread_index, tile_memory);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    Matrix scores[SM];
    UNROLLED for (int s = 0; s < SM; s++) {
        scores[s] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        UNROLLED for (int m = 0; m < QM; m++) {
            // K transposed: its matrix row is an element of the head, its column a key.
            const threadgroup T* from = tile_memory + (s * 8 + place.column) * STRIDE +
                part * (D / SPLIT) + m * 8 + place.row;
            Matrix k;
            k.thread_elements()[0] = float(from[0]);
            k.thread_elements()[1] = float(from[STRIDE]);
            metal::simdgroup_multiply_accumulate(scores[s], q[m], k, scores[s]);
        }
    }
    if (SPLIT > 1) {
        threadgroup float* sums = score_memory + row_group * SPLIT * 8 * KEYS;
        UNROLLED for (int s = 0; s < SM; s++) {
            const int at = (part * 8 + place.row) * KEYS + s * 8 + place.column;
            sums[at] = scores[s].thread_elements()[0];
            sums[at + 1] = scores[s].thread_elements()[1];
        }
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        UNROLLED for (int s = 0; s < SM; s++) {
            float even = 0.0f;
            float odd = 0.0f;
            UNROLLED for (int p = 0; p < SPLIT; p++) {
                const int at = (p * 8 + place.row) * KEYS + s * 8 + place.column;
                even += sums[at];
                odd += sums[at + 1];
            }
            scores[s].thread_elements()[0] = even;
            scores[s].thread_elements()[1] = odd;
        }
    }

    // Running softmax; the four lanes of a matrix row differ in bits 0 and 3.
    float next = top;
    UNROLLED for (int s = 0; s < SM; s++) {
        UNROLLED for (int e = 0; e < 2; e++) {
            const int key = base + s * 8 + place.column + e;
            const bool seen = key <= newest && position - key < window;
            const float product = scores[s].thread_elements()[e];
            float score = CAPPED ? capped(product, cap) : product;
            if (BIASED) {
                const float added = float(biases[metal::clamp(position - key, 0, extent - 1)]);
                score += position - key < extent ? added * LOG2_E : 0.0f;
            }
            scores[s].thread_elements()[e] = seen ? score : LOWEST;
            next = metal::max(next, scores[s].thread_elements()[e]);
        }
    }
    next = metal::max(next, metal::simd_shuffle_xor(next, 1));
    next = metal::max(next, metal::simd_shuffle_xor(next, 8));
    const float rescale = metal::exp2(top - next);
    float sum = 0.0f;
    UNROLLED for (int s = 0; s < SM; s++) {
        UNROLLED for (int e = 0; e < 2; e++) {
            const float score = scores[s].thread_elements()[e];
            const float weight = score > LOWEST ? metal::exp2(score - next) : 0.0f;
            scores[s].thread_elements()[e] = weight;
            sum += weight;
        }
    }
    sum += metal::simd_shuffle_xor(sum, 1);
    sum += metal::simd_shuffle_xor(sum, 8);
    total = total * rescale + sum;
    top = next;
    UNROLLED for (int m = 0; m < OM; m++) {
        acc[m].thread_elements()[0] *= rescale;
        acc[m].thread_elements()[1] *= rescale;
    }

    if (!LATENT) {
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all have read K
        stage<T, C, DV, KEYS, STRIDE, THREADS, SCALED>(
            value_pool, value_scales, context, DV, base, first, end, thread_index, tile_memory);
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    UNROLLED for (int m = 0; m < OM; m++) {
        UNROLLED for (int s = 0; s < SM; s++) {
            const threadgroup T* from = tile_memory + (s * 8 + place.row) * STRIDE +
                part * (DV / SPLIT) + m * 8 + place.column;
            Matrix v;
            v.thread_elements()[0] = float(from[0]);
            v.thread_elements()[1] = float(from[1]);
            metal::simdgroup_multiply_accumulate(acc[m], scores[s], v, acc[m]);
        }
    }
}

if (present) {
    const int out_row = request.first_out_row + row * tile.parts + tile.split;
    const ulong at = ulong(out_row) * num_heads + head;
    const float factor = PARTIAL ? 1.0f : 1.0f / total;
    UNROLLED for (int m = 0; m < OM; m++) {
        const int d = part * (DV / SPLIT) + m * 8 + place.column;
        out[at * DV + d] = O(acc[m].thread_elements()[0] * factor);
        out[at * DV + d + 1] = O(acc[m].thread_elements()[1] * factor);
    }
    if (PARTIAL && part == 0 && place.column == 0) {
        out_stats[at * 2] = top;
        out_stats[at * 2 + 1] = total;
    }
}
