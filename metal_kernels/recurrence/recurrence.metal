// SPDX-License-Identifier: Apache-2.0
// Recurrent states of a ragged step: gated delta rule and state-space models; formulas are in sequences.py.
//
// LANES lanes of a simdgroup hold one row of a state, DK elements, in registers from its read to its last
// write, and process the request's tokens with the same instructions: kept rows, certain rows, drafts.
// So a token's results do not depend on its kind. After each token a state is rounded to its
// dtype, so they do not depend on the boundaries of steps either.

// A row's elements are dealt to its lanes in runs, EACH per lane. Past the row's
// end, where a lane's last run may be, elements are zeros, read from the row's last run.
template <int DK, int LANES, int RUN>
inline uint run_start(int i, uint lane) {
  const uint run = i * LANES + lane;
  return (DK / RUN % LANES ? metal::min(run, uint(DK / RUN - 1)) : run) * RUN;
}

template <int DK, int LANES, int RUN>
inline bool has_run(int i, uint lane) {
  return DK / RUN % LANES == 0 || i * LANES + lane < DK / RUN;
}

// A lane's share of a row; assumes no alignment: keys are often a slice of an array.
template <int DK, int LANES, typename T, int EACH, int RUN>
inline void load_share(const device T* row, uint lane, thread float (&share)[EACH][RUN]) {
  UNROLLED for (int i = 0; i < EACH; i++) {
    const device T* run = row + run_start<DK, LANES, RUN>(i, lane);
    UNROLLED for (int j = 0; j < RUN; j++) {
      const float element = static_cast<float>(run[j]);
      share[i][j] = has_run<DK, LANES, RUN>(i, lane) ? element : 0.0f;
    }
  }
}

template <int DK, int LANES, typename T, int EACH, int RUN>
inline void store_share(device T* row, uint lane, const thread float (&share)[EACH][RUN]) {
  UNROLLED for (int i = 0; i < EACH; i++) {
    device T* run = row + run_start<DK, LANES, RUN>(i, lane);
    if (has_run<DK, LANES, RUN>(i, lane)) {
      UNROLLED for (int j = 0; j < RUN; j++) {
        run[j] = static_cast<T>(share[i][j]);
      }
    }
  }
}

// Runs of a state are aligned to their size.
template <typename S>
inline void load_run(device S* from, thread float (&run)[4]) {
  const metal::vec<S, 4> four = *(const device metal::vec<S, 4>*)from;
  UNROLLED for (int j = 0; j < 4; j++) {
    run[j] = static_cast<float>(four[j]);
  }
}

template <typename S>
inline void load_run(device S* from, thread float (&run)[1]) {
  run[0] = static_cast<float>(*from);
}

template <typename S>
inline void store_run(device S* to, const thread float (&run)[4]) {
  metal::vec<S, 4> four;
  UNROLLED for (int j = 0; j < 4; j++) {
    four[j] = static_cast<S>(run[j]);
  }
  *(device metal::vec<S, 4>*)to = four;
}

template <typename S>
inline void store_run(device S* to, const thread float (&run)[1]) {
  *to = static_cast<S>(run[0]);
}

// Sums over a row shared by lanes.
template <int LANES, int EACH, int RUN>
inline float product(const thread float (&a)[EACH][RUN], const thread float (&b)[EACH][RUN]) {
  float sums[RUN];
  UNROLLED for (int j = 0; j < RUN; j++) {
    sums[j] = a[0][j] * b[0][j];
    UNROLLED for (int i = 1; i < EACH; i++) {
      sums[j] += a[i][j] * b[i][j];
    }
  }
  float sum = RUN == 4 ? (sums[0] + sums[RUN / 4]) + (sums[RUN / 2] + sums[RUN - 1]) : sums[0];
  UNROLLED for (int step = 1; step < LANES; step *= 2) {
    sum += metal::simd_shuffle_xor(sum, step);
  }
  return sum;
}

// Location of a state's elements in a block.
template <typename S, typename P, int START, int KEYS, int VALUES, int NUM_HEADS>
struct States {
  const device P* key_pool;
  const device P* value_pool;
  ulong num_blocks;

  device S* at(int block, uint element) const {
    const uint byte = START + element * static_cast<uint>(sizeof(S));
    return (device S*)state_at<P, KEYS, VALUES, NUM_HEADS>(
        key_pool, value_pool, num_blocks, block, byte);
  }
};

template <int DK, int LANES, typename Place, int EACH, int RUN>
inline void load_state(
    const thread Place& states, int block, uint n, uint lane, thread float (&state)[EACH][RUN]) {
  UNROLLED for (int i = 0; i < EACH; i++) {
    if (has_run<DK, LANES, RUN>(i, lane)) {
      load_run(states.at(block, n * DK + run_start<DK, LANES, RUN>(i, lane)), state[i]);
    }
  }
}

template <int DK, int LANES, typename Place, int EACH, int RUN>
inline void store_state(
    const thread Place& states, int block, uint n, uint lane, const thread float (&state)[EACH][RUN]) {
  UNROLLED for (int i = 0; i < EACH; i++) {
    if (has_run<DK, LANES, RUN>(i, lane)) {
      store_run(states.at(block, n * DK + run_start<DK, LANES, RUN>(i, lane)), state[i]);
    }
  }
}

// ---- kernel body
// Template: T, V, S, P, dtypes of queries and keys, values and outputs, states, and pools; HK, DK,
// HV, DV; DELTA, whether the delta rule is used; DECAYS, 0: one per head, 1: per key element, 2: from rates; LANES,
// RUN; BLOCK_SIZE; START, first byte of the states; KEYS, VALUES, NUM_HEADS, SPLIT of the pools as in
// read_states.metal. Grid: (LANES * rows of a state, up to whole simdgroups, requests).
constexpr int EACH = (DK / RUN + LANES - 1) / LANES;
const uint lane = thread_position_in_grid.x % LANES;
const uint place = thread_position_in_grid.x / LANES;
const uint n = metal::min(place, uint(HV * DV - 1));
const bool is_there = place == n;  // else it only completes its simdgroup and writes nothing
const uint head = n / DV;
const uint key_head = head / (HV / HK);
const int request = thread_position_in_grid.y;
if (request == 0 && thread_position_in_grid.x < 8) {
  fence[thread_position_in_grid.x] = 0;
}

const device Sequence& sequence = ((const device Sequence*)table)[request];
const device int* full_blocks = blocks + static_cast<ulong>(request) * blocks_shape[1];
const ulong num_blocks = key_pool_shape[1] / SPLIT;
const States<S, P, START, KEYS, VALUES, NUM_HEADS> states = {key_pool, value_pool, num_blocks};
const int start = sequence.position;
const int write = sequence.write;
const int keep_at = sequence.keep_at;
const int num_kept = sequence.num_kept;
const int first_kept = sequence.first_kept;
const int first_row = sequence.first_row - num_kept;  // so that token t is row first_row + t
const int certain = num_kept + sequence.num_certain;
const int count = num_kept + sequence.num_rows;

float state[EACH][RUN];
UNROLLED for (int i = 0; i < EACH; i++) {
  UNROLLED for (int j = 0; j < RUN; j++) {
    state[i][j] = 0.0f;
  }
}
if (start > 0 && is_there) {  // others would read what is being written
  load_state<DK, LANES>(states, sequence.read, n, lane, state);
}
float log_rate[EACH][RUN];
if (DECAYS == 2) {
  load_share<DK, LANES>(log_rates + head * DK, lane, log_rate);
}

for (int t = 0;; t++) {
  // Stores the state after t tokens, if it is certain and wanted.
  if (t <= certain) {
    const int position = start + t;
    const bool is_full = t > 0 && position % BLOCK_SIZE == 0;
    const int own = t == certain ? write : 0;
    const int full = is_full ? full_blocks[position / BLOCK_SIZE - 1] : 0;
    if (own != 0 && is_there) {
      store_state<DK, LANES>(states, own, n, lane, state);
    }
    if (full != 0 && full != own && is_there) {
      store_state<DK, LANES>(states, full, n, lane, state);
    }
  }
  if (t == count) {
    break;
  }

  const bool is_kept = t < num_kept;
  const ulong row = (is_kept ? first_kept : first_row) + t;
  const device T* key_row = (is_kept ? kept_keys : keys) + (row * HK + key_head) * DK;
  const device T* query_row = is_kept ? key_row : queries + (row * HK + key_head) * DK;
  float key[EACH][RUN];
  float query[EACH][RUN];
  float decay[EACH][RUN];
  load_share<DK, LANES>(key_row, lane, key);
  load_share<DK, LANES>(query_row, lane, query);
  const V value = (is_kept ? kept_values : values)[row * (HV * DV) + n];
  const float rate = (is_kept ? kept_rates : rates)[row * HV + head];
  const device float* decays_of_row = is_kept ? kept_decays : decays;
  if (DECAYS == 1) {
    load_share<DK, LANES>(decays_of_row + (row * HV + head) * DK, lane, decay);
  } else {
    const float of_head = DECAYS == 0 ? decays_of_row[row * HV + head] : 0.0f;
    UNROLLED for (int i = 0; i < EACH; i++) {
      UNROLLED for (int j = 0; j < RUN; j++) {
        decay[i][j] = DECAYS == 0 ? of_head : metal::precise::exp(rate * log_rate[i][j]);
      }
    }
  }

  UNROLLED for (int i = 0; i < EACH; i++) {
    UNROLLED for (int j = 0; j < RUN; j++) {
      state[i][j] *= decay[i][j];
    }
  }
  const float known = DELTA ? product<LANES>(state, key) : 0.0f;
  const float change = rate * (static_cast<float>(value) - known);
  UNROLLED for (int i = 0; i < EACH; i++) {
    UNROLLED for (int j = 0; j < RUN; j++) {
      state[i][j] = static_cast<float>(static_cast<S>(state[i][j] + change * key[i][j]));
    }
  }
  const float output = product<LANES>(state, query);
  if (!is_kept && is_there && lane == 0) {
    outputs[row * (HV * DV) + n] = static_cast<V>(output);
  }

  if (t >= certain && is_there) {
    const ulong to = keep_at + t - certain;
    const bool is_first = n % DV == 0;  // of the head's rows
    if (lane == 0) {
      next_values[to * (HV * DV) + n] = value;
    }
    if (lane == 0 && is_first) {
      next_rates[to * HV + head] = rate;
    }
    if (DECAYS == 0 && lane == 0 && is_first) {
      next_decays[to * HV + head] = decay[0][0];
    }
    if (DECAYS == 1 && is_first) {
      store_share<DK, LANES>(next_decays + (to * HV + head) * DK, lane, decay);
    }
    if (is_first && head % (HV / HK) == 0) {
      store_share<DK, LANES>(next_keys + (to * HK + key_head) * DK, lane, key);
    }
  }
}
