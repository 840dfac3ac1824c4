// SPDX-License-Identifier: Apache-2.0
// Causal convolution of each channel along the rows of each request of a ragged step.
//
// A thread computes one channel of a tile of rows. The state is the request's newest TAPS - 1 inputs. Only the
// threads of a request's first tile read and write it, reading before they write. They take inputs
// of other tiles from the rows, so no thread reads what another one writes.

// A channel's inputs of one request, by index: 0 is the first applied, negative ones are in the state.
template <typename T, int TAPS>
struct Inputs {
  const device T* kept;
  const device T* rows;
  int num_kept;
  uint channels;
  float state[TAPS - 1];

  float at(int number) const {
    if (number >= 0) {
      const bool is_kept = number < num_kept;
      const ulong row = is_kept ? number : number - num_kept;
      return static_cast<float>((is_kept ? kept : rows)[row * channels]);
    }
    float found = state[0];
    UNROLLED for (int j = 1; j < TAPS - 1; j++) {
      found = number + TAPS - 1 == j ? state[j] : found;
    }
    return found;
  }
};

// Location of input `j` of a channel in a state's block.
template <typename S, typename P, int KEYS, int VALUES, int NUM_HEADS, int START>
inline device S* state_of(
    int j,
    uint channel,
    uint channels,
    const device P* key_pool,
    const device P* value_pool,
    ulong num_blocks,
    int block) {
  const uint at = START + (j * channels + channel) * static_cast<uint>(sizeof(S));
  return (device S*)state_at<P, KEYS, VALUES, NUM_HEADS>(
      key_pool, value_pool, num_blocks, block, at);
}

// Clears bytes of a block up to a multiple of 16; threads take runs of 16 bytes in turn.
template <typename P, int KEYS, int VALUES, int NUM_HEADS>
inline void clear(
    uint from,
    uint to,
    uint thread_index,
    uint num_threads,
    const device P* key_pool,
    const device P* value_pool,
    ulong num_blocks,
    int block) {
  for (uint run = from / 16 + thread_index; run * 16 < to; run += num_threads) {
    device uchar* bytes =
        state_at<P, KEYS, VALUES, NUM_HEADS>(key_pool, value_pool, num_blocks, block, run * 16);
    if (run * 16 >= from) {
      *(device metal::vec<uint, 4>*)bytes = metal::vec<uint, 4>(0);
    } else {
      for (uint i = from % 16; i < 16; i++) {
        bytes[i] = 0;
      }
    }
  }
}

// Writes a channel's state after `count` inputs into a block. If it was read from another block, clears the
// rest of the block's last owner: the gap between this part and the next, and what follows the whole state.
template <
    typename S,
    typename P,
    int KEYS,
    int VALUES,
    int NUM_HEADS,
    int START,
    int END,
    int CLEAR_FROM,
    int CLEAR_TO,
    typename T,
    int TAPS>
inline void write_state(
    const thread Inputs<T, TAPS>& given,
    int count,
    uint channel,
    const device P* key_pool,
    const device P* value_pool,
    ulong num_blocks,
    int block,
    int read) {
  UNROLLED for (int j = 0; j < TAPS - 1; j++) {
    *state_of<S, P, KEYS, VALUES, NUM_HEADS, START>(
        j, channel, given.channels, key_pool, value_pool, num_blocks, block) =
        static_cast<S>(given.at(count + j - (TAPS - 1)));
  }
  if (block != read) {
    clear<P, KEYS, VALUES, NUM_HEADS>(
        END, (END + 15) / 16 * 16, channel, given.channels, key_pool, value_pool, num_blocks, block);
    clear<P, KEYS, VALUES, NUM_HEADS>(
        CLEAR_FROM, CLEAR_TO, channel, given.channels, key_pool, value_pool, num_blocks, block);
  }
}

// ---- kernel body
// Template: T, S, P, dtypes of the rows, the states and the pools; TAPS; HAS_BIAS; BLOCK_SIZE; START,
// first byte of the states, END, one past them; CLEAR_FROM, CLEAR_TO, range to clear with them;
// KEYS, VALUES, NUM_HEADS, SPLIT of the pools as in read_states.metal; TILE_ROWS. Grid: (channels, tiles).
const uint channel = thread_position_in_grid.x;
const uint channels = weight_shape[0];
if (thread_position_in_grid.y == 0) {
  for (uint i = channel; i < 8; i += threads_per_grid.x) {
    fence[i] = 0;
  }
}

const int request = tiles[2 * thread_position_in_grid.y];
const int first = tiles[2 * thread_position_in_grid.y + 1];  // among the request's rows
const device Sequence& sequence = ((const device Sequence*)table)[request];
const ulong num_blocks = key_pool_shape[1] / SPLIT;
if (first > 0 && first >= sequence.num_rows) {
  return;  // padding, no tile
}

Inputs<T, TAPS> given;
given.kept = kept + static_cast<ulong>(sequence.first_kept) * channels + channel;
given.rows = inputs + static_cast<ulong>(sequence.first_row) * channels + channel;
given.num_kept = sequence.num_kept;
given.channels = channels;
const bool reads = first == 0 && sequence.position > 0;
UNROLLED for (int j = 0; j < TAPS - 1; j++) {
  given.state[j] = 0.0f;
  if (reads) {
    given.state[j] = static_cast<float>(*state_of<S, P, KEYS, VALUES, NUM_HEADS, START>(
        j, channel, channels, key_pool, value_pool, num_blocks, sequence.read));
  }
}

float factors[TAPS];
float newest[TAPS];
UNROLLED for (int j = 0; j < TAPS; j++) {
  factors[j] = static_cast<float>(weight[channel * TAPS + j]);
  newest[j] = 0.0f;
}
UNROLLED for (int j = 1; j < TAPS; j++) {
  newest[j] = given.at(sequence.num_kept + first + j - TAPS);
}
const float offset = HAS_BIAS ? static_cast<float>(bias[channel]) : 0.0f;
const int end = metal::min(first + TILE_ROWS, sequence.num_rows);
for (int row = first; row < end; row++) {
  UNROLLED for (int j = 0; j < TAPS - 1; j++) {
    newest[j] = newest[j + 1];
  }
  newest[TAPS - 1] = static_cast<float>(given.rows[static_cast<ulong>(row) * channels]);
  float sum = offset;
  UNROLLED for (int j = 0; j < TAPS; j++) {
    sum += factors[j] * newest[j];
  }
  out[static_cast<ulong>(sequence.first_row + row) * channels + channel] = static_cast<T>(sum);
  if (row >= sequence.num_certain) {
    const ulong to = sequence.keep_at + row - sequence.num_certain;
    next_kept[to * channels + channel] = static_cast<T>(newest[TAPS - 1]);
  }
}

// States: after each certain input that ends its block, and after the last certain one.
if (first == 0) {
  const int certain = sequence.num_kept + sequence.num_certain;
  const int read = sequence.position > 0 ? sequence.read : 0;
  const device int* full_blocks = blocks + static_cast<ulong>(request) * blocks_shape[1];
  int index = sequence.position / BLOCK_SIZE;
  int count = BLOCK_SIZE - sequence.position % BLOCK_SIZE;  // inputs up to that block's last one
  for (; count <= certain; count += BLOCK_SIZE, index++) {
    const int block = full_blocks[index];
    if (block != 0 && (count != certain || block != sequence.write)) {
      write_state<S, P, KEYS, VALUES, NUM_HEADS, START, END, CLEAR_FROM, CLEAR_TO>(
          given, count, channel, key_pool, value_pool, num_blocks, block, read);
    }
  }
  if (sequence.write != 0) {
    write_state<S, P, KEYS, VALUES, NUM_HEADS, START, END, CLEAR_FROM, CLEAR_TO>(
        given, certain, channel, key_pool, value_pool, num_blocks, sequence.write, read);
  }
}
