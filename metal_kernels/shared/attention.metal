// SPDX-License-Identifier: Apache-2.0
// Shared by the attention kernels: descriptions of query tiles, and locations of a request's K/V.
// Scores are in units of log2, so that exp2 can replace exp.

// For loops over arrays that must stay in registers: a run-time index would spill them.
#define UNROLLED _Pragma("clang loop unroll(full)")
// For loops that would load into too many registers at once.
#define ROLLED _Pragma("clang loop unroll(disable)")

constant constexpr float LOG2_E = 1.4426950408889634f;

// A request's rows in the step, or one listed row; dispatch.py defines the order of fields.
struct Request {
    int first_row;       // among the queries
    int first_out_row;   // in the output, where all parts of a row are adjacent
    int first_position;  // position of its first row in the request
    int length;          // context length: slots beyond may belong to other requests
};

// Work of one threadgroup: query rows against a range of the context. Rows are packed: packed
// row p is query row p / group, head p % group of the query heads that share a K/V head.
struct Tile {
    int request;  // the rows' request; if they are listed, that of packed row 0
    int packed_begin;
    int packed_count;
    int begin;  // first context position
    int end;    // one past the last; the request may end earlier
    int split;  // index of this part of the context
    int parts;  // number of parts; 1: not split
    int table;  // block table if rows are listed; else the request's
};

// Parameters of all tiles of a dispatch: scoring and visibility.
struct Scoring {
    float scale;  // factor on the queries, including log2(e) or the cap's divisor
    float cap;    // soft cap of tanh, in units of log2
    int window;   // positions a query sees, including its own
    int listed;   // each query row has its own Request, and sees the tile's whole range
    int bidirectional;  // rows of a request also see those after them
    int extent;  // number of distances with a relative bias; beyond, there is none
    int unused[2];
};

inline float capped(float product, float cap) {
    return cap * metal::precise::tanh(product);
}

// Location of one K/V head of one request in a pool of [heads, blocks, block_size, row].
struct Context {
    ulong first_slot;  // first slot of the head
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

// Lane's position in an 8x8 matrix: its row, and the first of two neighboring columns. Apple does not
// document it; MLX's own matrix kernels rely on it, and the self-check would detect a change.
struct Place {
    int row;
    int column;

    Place(uint lane) {
        const int quad = int(lane) / 4;
        row = (quad & 4) + (int(lane) / 2) % 4;
        column = (quad & 2) * 2 + (int(lane) % 2) * 2;
    }
};
