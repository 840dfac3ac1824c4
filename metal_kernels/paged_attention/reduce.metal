// SPDX-License-Identifier: Apache-2.0
// Joins the parts that the splits of a long context left: a simdgroup per output row and head.

// ---- kernel body
// Template: T, dtype of the output; DV, size of values. Grid: (32, H, rows).
const int row = thread_position_in_grid.z;
const int head = thread_position_in_grid.y;
const int rows = parts_shape[1];
const int num_heads = parts_shape[2];
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
for (int d = int(thread_index_in_simdgroup); d < DV; d += 32) {
    float sum = 0.0f;
    for (int s = 0; s < count; s++) {
        const ulong at = (ulong(s) * rows + row) * num_heads + head;
        sum += parts[at * DV + d] * metal::exp2(stats[at * 2] - top);
    }
    out[(ulong(row) * num_heads + head) * DV + d] = T(sum / total);
}
