// SPDX-License-Identifier: Apache-2.0
// Joins the parts that the splits of a long context left: a simdgroup per output row and head.

// The parts of an output row, which follow each other: those of its request alone, and those of what it
// begins with in common with others, in arrays of their own.
struct Row {
    int first;
    int count;
    int first_shared;
    int num_shared;
};

// ---- kernel body
// Template: T, dtype of the output; DV, size of values. Grid: (32, H, rows).
const int out_row = thread_position_in_grid.z;
const int head = thread_position_in_grid.y;
const int lane = thread_index_in_simdgroup;
const int num_heads = parts_shape[1];
const device Row& row = ((const device Row*)rows)[out_row];
const int own = row.count;
const int count = own + row.num_shared;
const ulong first = ulong(row.first) * num_heads + head;
const ulong first_shared = ulong(row.first_shared) * num_heads + head;
float top = LOWEST;
for (int s = lane; s < own; s += 32) {
    top = metal::max(top, stats[(first + ulong(s) * num_heads) * 2]);
}
for (int s = lane; s < row.num_shared; s += 32) {
    top = metal::max(top, shared_stats[(first_shared + ulong(s) * num_heads) * 2]);
}
top = metal::simd_max(top);
float total = 0.0f;
for (int s = lane; s < own; s += 32) {
    const ulong at = (first + ulong(s) * num_heads) * 2;
    total += stats[at + 1] * metal::exp2(stats[at] - top);
}
for (int s = lane; s < row.num_shared; s += 32) {
    const ulong at = (first_shared + ulong(s) * num_heads) * 2;
    total += shared_stats[at + 1] * metal::exp2(shared_stats[at] - top);
}
total = metal::simd_sum(total);

constexpr int N = (DV + 31) / 32;  // elements of a row that a lane holds
constexpr int AHEAD = 16 / N;      // parts whose loads wait for memory at the same time
float sum[N];
UNROLLED for (int i = 0; i < N; i++) {
    sum[i] = 0.0f;
}
for (int s = 0; s < count; s += AHEAD) {
    float part_top[AHEAD];
    float part[AHEAD][N];
    UNROLLED for (int k = 0; k < AHEAD; k++) {
        // Past the last part, or element, the last one is loaded again: no load is conditional.
        const int p = metal::min(s + k, count - 1);
        const bool mine = p < own;
        const ulong at = mine ? first + ulong(p) * num_heads : first_shared + ulong(p - own) * num_heads;
        part_top[k] = (mine ? stats : shared_stats)[at * 2];
        const device float* found = (mine ? parts : shared_parts) + at * DV;
        UNROLLED for (int i = 0; i < N; i++) {
            part[k][i] = found[metal::min(lane + 32 * i, DV - 1)];
        }
    }
    UNROLLED for (int k = 0; k < AHEAD; k++) {
        const float weight = s + k < count ? metal::exp2(part_top[k] - top) : 0.0f;
        UNROLLED for (int i = 0; i < N; i++) {
            sum[i] += part[k][i] * weight;
        }
    }
}
UNROLLED for (int i = 0; i < N; i++) {
    const int d = lane + 32 * i;
    if (DV % 32 == 0 || d < DV) {
        out[(ulong(out_row) * num_heads + head) * DV + d] = T(sum[i] / total);
    }
}
