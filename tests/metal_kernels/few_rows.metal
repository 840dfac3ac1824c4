// SPDX-License-Identifier: Apache-2.0
// The main loop of a decode kernel that keeps within its budget, for the tests to plant faults in. It
// is never run, and what follows the loop joins nothing.
// Flat: a simdgroup's lanes share a row of K or V, for ROWS query rows and a pool of one-byte codes.

constant constexpr int STRIP = 4;
typedef metal::vec<uint8_t, 4> Codes;

// ---- kernel body
// Template: ROWS. Head size 128, 256 threads. Grid: (256 * tiles), a tile being a context.
threadgroup float merged[ROWS * 8 * 128];
const uint lane = thread_index_in_simdgroup;
const int walker = int(simdgroup_index_in_threadgroup);
const device int* table = tables + threadgroup_position_in_grid.x * 1024;
const int end = lengths[threadgroup_position_in_grid.x];

float q[ROWS][4];
float acc[ROWS][4];
float top[ROWS];
float total[ROWS];
UNROLLED for (int r = 0; r < ROWS; r++) {
    UNROLLED for (int i = 0; i < 4; i++) {
        q[r][i] = float(queries[(threadgroup_position_in_grid.x * ROWS + r) * 128 + lane * 4 + i]);
        acc[r][i] = 0.0f;
    }
    top[r] = LOWEST;
    total[r] = 0.0f;
}
for (int base = walker * STRIP; base < end; base += 8 * STRIP) {
    const ulong slot = ulong(table[base >> 4]) * 16 + (base & 15);
    Codes keys[STRIP];
    Codes values[STRIP];
    float key_scale[STRIP];
    float value_scale[STRIP];
    UNROLLED for (int k = 0; k < STRIP; k++) {
        const ulong row = slot + metal::min(k, end - 1 - base);
        keys[k] = *(const device Codes*)(key_pool + row * 128 + lane * 4);
        key_scale[k] = float(key_scales[row]);
        values[k] = *(const device Codes*)(value_pool + row * 128 + lane * 4);
        value_scale[k] = float(value_scales[row]);
    }
    UNROLLED for (int r = 0; r < ROWS; r++) {
        float scores[STRIP];
        float next = top[r];
        UNROLLED for (int k = 0; k < STRIP; k++) {
            float score = 0.0f;
            UNROLLED for (int i = 0; i < 4; i++) {
                score += q[r][i] * float(keys[k][i]);
            }
            score = metal::simd_sum(score) * key_scale[k];
            scores[k] = base + k < end ? score : LOWEST;
            next = metal::max(next, scores[k]);
        }
        const float rescale = metal::fast::exp2(top[r] - next);
        top[r] = next;
        total[r] *= rescale;
        UNROLLED for (int i = 0; i < 4; i++) {
            acc[r][i] *= rescale;
        }
        UNROLLED for (int k = 0; k < STRIP; k++) {
            const float weight = metal::fast::exp2(scores[k] - next);
            total[r] += weight;
            UNROLLED for (int i = 0; i < 4; i++) {
                acc[r][i] += weight * value_scale[k] * float(values[k][i]);
            }
        }
    }
}
UNROLLED for (int r = 0; r < ROWS; r++) {
    UNROLLED for (int i = 0; i < 4; i++) {
        merged[(r * 8 + walker) * 128 + int(lane) * 4 + i] = acc[r][i] / total[r];
    }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
for (int at = walker * 32 + int(lane); at < ROWS * 128; at += 256) {
    float sum = 0.0f;
    for (int w = 0; w < 8; w++) {
        sum += merged[(at / 128 * 8 + w) * 128 + at % 128];
    }
    out[threadgroup_position_in_grid.x * ROWS * 128 + at] = sum;
}
