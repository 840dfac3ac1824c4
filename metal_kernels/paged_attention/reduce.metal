// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of a split context, for each output row and head.
//
// WALKS walks take AHEAD parts of a row at a time, in turn, each with a running softmax (Milakov & Gimelshein
// 2018, arXiv:1805.02867); walks are joined in order. All simdgroups of a threadgroup walk in parallel,
// through its memory; with one simdgroup, rows of other heads may run beside it. A part's number alone
// determines its walk: a row's result depends on neither the number of walkers nor other rows' parts.

// The adjacent parts of an output row: those of its own context, and those of a shared
// prefix, in separate arrays.
struct Row {
    int first;
    int count;
    int first_shared;
    int num_shared;
};

// Some of a row's parts: largest score, in units of log2, sum of weights, and N elements of the
// weighted sum of values. A weight is never above 1.
template <int N>
struct Joined {
    float top;
    float total;
    float elements[N];

    Joined() {
        top = LOWEST;
        total = 0.0f;
        UNROLLED for (int i = 0; i < N; i++) {
            elements[i] = 0.0f;
        }
    }

    // Adds COUNT more parts; `stats` are the largest score and the sum of each. Rounds alike at all call sites.
    template <int COUNT>
    void add(const thread float2 (&stats)[COUNT], const thread float (&found)[COUNT][N]) {
        float both = top;
        UNROLLED for (int k = 0; k < COUNT; k++) {
            both = metal::max(both, stats[k][0]);
        }
        const float before = metal::exp2(top - both);
        top = both;
        total *= before;
        UNROLLED for (int i = 0; i < N; i++) {
            elements[i] *= before;
        }
        UNROLLED for (int k = 0; k < COUNT; k++) {
            const float weight = metal::exp2(stats[k][0] - both);
            total = metal::fma(stats[k][1], weight, total);
            UNROLLED for (int i = 0; i < N; i++) {
                elements[i] = metal::fma(found[k][i], weight, elements[i]);
            }
        }
    }
};

// ---- kernel body
// Template: T, dtype of the output; DV, size of values; WALKS.
// Grid: (32 * simdgroups per row, 8 at most, H, rows); a threadgroup spans all of the first axis.
constexpr int N = (DV + 31) / 32;  // elements of a row per lane
constexpr int AHEAD = 16 / N;      // parts loaded at the same time
threadgroup float2 walk_stats[WALKS];
threadgroup float walk_elements[WALKS * N * 32];
const int out_row = thread_position_in_grid.z;
const int head = thread_position_in_grid.y;
const int thread_index = thread_position_in_grid.x;  // within this row and head
const int lane = thread_index_in_simdgroup;
const int walkers = int(threads_per_threadgroup.x) / 32;
const int num_heads = parts_shape[1];
const device Row& row = ((const device Row*)rows)[out_row];
const int own = row.count;
const int count = own + row.num_shared;
const ulong first = ulong(row.first) * num_heads + head;
const ulong first_shared = ulong(row.first_shared) * num_heads + head;
device T* to = out + (ulong(out_row) * num_heads + head) * DV;

Joined<N> joined;
for (int walk = thread_index / 32; walk < WALKS; walk += walkers) {
    Joined<N> walked;
    for (int s = walk * AHEAD; s < count; s += WALKS * AHEAD) {
        float2 part_stats[AHEAD];
        float part[AHEAD][N];
        UNROLLED for (int k = 0; k < AHEAD; k++) {
            // Past the last part or element, the last one is loaded again: loads are unconditional.
            const int p = metal::min(s + k, count - 1);
            const bool mine = p < own;
            const ulong at = mine ? first + ulong(p) * num_heads : first_shared + ulong(p - own) * num_heads;
            part_stats[k] = *(const device float2*)((mine ? stats : shared_stats) + at * 2);
            const device float* found = (mine ? parts : shared_parts) + at * DV;
            UNROLLED for (int i = 0; i < N; i++) {
                part[k][i] = found[metal::min(lane + 32 * i, DV - 1)];
            }
        }
        UNROLLED for (int k = 0; k < AHEAD; k++) {
            part_stats[k][0] = s + k < count ? part_stats[k][0] : LOWEST;
        }
        walked.add(part_stats, part);
    }
    float2 walk_stat[1];
    float walk_found[1][N];
    walk_stat[0][0] = walked.top;
    walk_stat[0][1] = walked.total;
    UNROLLED for (int i = 0; i < N; i++) {
        walk_found[0][i] = walked.elements[i];
    }
    if (walkers > 1) {
        if (lane == 0) {
            walk_stats[walk] = walk_stat[0];
        }
        UNROLLED for (int i = 0; i < N; i++) {
            walk_elements[(walk * N + i) * 32 + lane] = walk_found[0][i];
        }
    } else {
        joined.add(walk_stat, walk_found);
    }
}

if (walkers > 1) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int d = thread_index; d < DV; d += 32 * walkers) {
        Joined<1> element;
        UNROLLED for (int walk = 0; walk < WALKS; walk++) {
            float2 stat[1];
            float found[1][1];
            stat[0] = walk_stats[walk];
            found[0][0] = walk_elements[walk * N * 32 + d];
            element.add(stat, found);
        }
        to[d] = T(element.elements[0] / element.total);
    }
} else {
    UNROLLED for (int i = 0; i < N; i++) {
        const int d = lane + 32 * i;
        if (DV % 32 == 0 || d < DV) {
            to[d] = T(joined.elements[i] / joined.total);
        }
    }
}
