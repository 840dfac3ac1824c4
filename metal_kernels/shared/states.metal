// SPDX-License-Identifier: Apache-2.0
// Shared by kernels that work token by token: a request's part of the step, and its state's location.
// A state's bytes fill a block's K, head by head, and continue in its V.

#define UNROLLED _Pragma("clang loop unroll(full)")

// A row of Sequences.table, see metal_kernels/sequences.py.
struct Sequence {
  int first_row;
  int num_rows;
  int num_certain;
  int first_kept;
  int num_kept;
  int position;
  int read;
  int write;
  int keep_at;
};

// Location of byte `at` of the state in a block, in pools of P. KEYS and VALUES are elements of a block
// in one head of each pool, a multiple of 16 bytes, so that aligned 16 bytes of a state stay together.
template <typename P, int KEYS, int VALUES, int NUM_HEADS>
inline device uchar* state_at(
    const device P* key_pool, const device P* value_pool, ulong num_blocks, int block, uint at) {
  constexpr uint OF_KEYS = KEYS * sizeof(P);
  constexpr uint OF_VALUES = VALUES * sizeof(P);
  if (at < OF_KEYS * NUM_HEADS) {
    const ulong head = at / OF_KEYS;
    const ulong start = (head * num_blocks + block) * OF_KEYS;
    return (device uchar*)const_cast<device P*>(key_pool) + start + at % OF_KEYS;
  }
  const uint behind = at - OF_KEYS * NUM_HEADS;
  const ulong head = behind / OF_VALUES;
  const ulong start = (head * num_blocks + block) * OF_VALUES;
  return (device uchar*)const_cast<device P*>(value_pool) + start + behind % OF_VALUES;
}
