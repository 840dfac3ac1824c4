// SPDX-License-Identifier: Apache-2.0
// Joins the parts that the splits of a long context left: a simdgroup per output row and head.

template <typename T, int DV>
inline void reduce(
    const device float* parts,
    const device float* stats,
    const device int* num_splits,
    int rows,
    int num_heads,
    device T* out,
    int row,
    int head,
    uint lane) {
    const int count = num_splits[row];
    float top = LOWEST;
    for (int s = 0; s < count; s++) {
        top = metal::max(top, stats[((ulong(s) * rows + row) * num_heads + head) * 2]);
    }
    float total = 0.0f;
    for (int s = 0; s < count; s++) {
        const ulong at = ((ulong(s) * rows + row) * num_heads + head) * 2;
        total += stats[at + 1] * metal::exp2(stats[at] - top);
    }
    for (int d = int(lane); d < DV; d += 32) {
        float sum = 0.0f;
        for (int s = 0; s < count; s++) {
            const ulong at = (ulong(s) * rows + row) * num_heads + head;
            sum += parts[at * DV + d] * metal::exp2(stats[at * 2] - top);
        }
        out[(ulong(row) * num_heads + head) * DV + d] = T(sum / total);
    }
}

// ---- kernel body
reduce<T, DV>(
    parts, stats, num_splits, parts_shape[1], parts_shape[2], out, thread_position_in_grid.z,
    thread_position_in_grid.y, thread_index_in_simdgroup);
