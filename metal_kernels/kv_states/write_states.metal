// SPDX-License-Identifier: Apache-2.0
// Writes states into blocks, through pools given as inputs. See read_states.metal for a state's location;
// clears the rest of that memory.

// ---- kernel body
// Template: as in read_states.metal. Grid: (elements of the pools that hold states / RUN, states).
const uint first = thread_position_in_grid.x * RUN;
const uint state = thread_position_in_grid.y;
if (state == 0) {
  for (uint i = thread_position_in_grid.x; i < 8; i += threads_per_grid.x) {
    fence[i] = 0;
  }
}

const ulong block = blocks[state];
const ulong num_blocks = key_pool_shape[1] / SPLIT;
const bool in_keys = first < KEYS * NUM_HEADS;
const uint size = in_keys ? KEYS : VALUES;
const uint to = in_keys ? first : first - KEYS * NUM_HEADS;
const ulong start = (to / size * num_blocks + block) * size + to % size;
const device U* source = states + static_cast<ulong>(state) * WIDTH + first;
device T* target = const_cast<device T*>(in_keys ? key_pool : value_pool) + start;
for (int i = 0; i < RUN; i++) {
  target[i] = first < WIDTH ? as_type<T>(source[i]) : static_cast<T>(0);
}
