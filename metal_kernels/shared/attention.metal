// SPDX-License-Identifier: Apache-2.0
// What the attention kernels share: how a tile of queries is described, where a request's K/V lie.
// Scores are kept in units of log2, so that exp2 serves as the exponential.

// Before loops over arrays that must stay in registers: an index known only at run time spills them.
#define UNROLLED _Pragma("clang loop unroll(full)")
// Before loops that would load into too many at once.
#define ROLLED _Pragma("clang loop unroll(disable)")

constant constexpr float LOG2_E = 1.4426950408889634f;

// A request's rows in the step, or one row of those that are listed; fields as dispatch.py lays them out.
struct Request {
    int first_row;       // of the queries
    int first_out_row;   // of the output, where all parts of a row follow each other
    int first_position;  // in the request, of its first row
    int length;          // of its context: a slot past it may be another request's
};

// What one threadgroup works on: query rows against a range of the context. Rows are packed: packed
// row p is query row p / group, head p % group of the query heads that share a K/V head.
struct Tile {
    int request;  // of its rows; where they are listed, that of packed row 0
    int packed_begin;
    int packed_count;
    int begin;  // first context position
    int end;    // past the last; the request may end before
    int split;  // which part of the context this is
    int parts;  // how many there are; 1: it is whole
    int table;  // block table, where rows are listed; else that of the request
};

// What holds for all tiles of a dispatch: how dot products become scores, and which do.
struct Scoring {
    float scale;  // on the queries, log2(e) or the cap's divisor included
    float cap;    // of tanh, in units of log2
    int window;   // positions a query sees, itself included
    int listed;   // whether each query row has a Request of its own, and sees the tile's whole range
    int unused[4];
};

inline float capped(float product, float cap) {
    return cap * metal::precise::tanh(product);
}

// Where one K/V head of one request lies in a pool of [heads, blocks, block_size, row].
struct Context {
    ulong first_slot;  // of the head
    uint shift;        // log2 of the block size
    const device int* table;

    Context(const constant int* pool_shape, uint head, const device int* request_table) {
        first_slot = ulong(head) * uint(pool_shape[1]) * uint(pool_shape[2]);
        shift = ctz(uint(pool_shape[2]));
        table = request_table;
    }

    // Slot of a position, counted from the pool's first.
    ulong slot(int position) const {
        const uint offset = uint(position) & ((1u << shift) - 1u);
        return first_slot + (ulong(uint(table[uint(position) >> shift])) << shift) + offset;
    }
};

// Lane's place in an 8x8 matrix: its row, and the first of two neighboring columns. Apple does not
// document it; MLX's own matrix kernels rely on it, and the self-check would find it changed.
struct Place {
    int row;
    int column;

    Place(uint lane) {
        const int quad = int(lane) / 4;
        row = (quad & 4) + (int(lane) / 2) % 4;
        column = (quad & 2) * 2 + (int(lane) % 2) * 2;
    }
};
