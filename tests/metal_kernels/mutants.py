# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in the kernels' sources, each with the check that must catch it."""

from dataclasses import dataclass

# Detection: a kind of metal_interpreter.KernelViolation, or a result that differs from the formula.
RACE = "race"
BOUNDS = "out_of_bounds"
UNWRITTEN = "uninitialized"
WRONG = "wrong result"

NUMERIC = "shared/numeric.metal"
ATTENTION = "shared/attention.metal"
FRAGMENTS = "shared/fragments.metal"
DECODE = "paged_attention/decode.metal"
PREFILL = "paged_attention/prefill.metal"
REDUCE = "paged_attention/reduce.metal"
WRITE = "kv_write/kv_write.metal"
GATHER = "kv_gather/kv_gather.metal"
BLOCKS = "kv_blocks/kv_blocks.metal"
READ_STATES = "kv_states/read_states.metal"
WRITE_STATES = "kv_states/write_states.metal"
STATES = "shared/states.metal"
CONVOLUTION = "convolution/convolution.metal"
RECURRENCE = "recurrence/recurrence.metal"


@dataclass(frozen=True)
class Mutant:
    """One fault: replaces `text`, which occurs once in every kernel made of `file`."""

    file: str  # in metal_kernels
    probe: str  # of test_mutants.py: the call that detects it
    caught_by: str
    what: str
    text: str
    replacement: str

    def __str__(self) -> str:
        name = self.file.split("/")[-1].removesuffix(".metal")
        return f"{name}: {self.what}"


_BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"

_Faults = dict[tuple[str, str, str], list[tuple[str, str, str]]]

# (file, probe, caught by): (what, text, replacement) of each.
_FAULTS: _Faults = {
    (NUMERIC, "write, fp8", WRONG): [
        ("fp8 ties rounded up, not to even", "rebiased + 0x7ffffu + odd", "rebiased + 0x80000u"),
        ("fp8 cut instead of rounded", "rebiased + 0x7ffffu + odd", "rebiased"),
        ("fp8 saturated to the code of NaN", "sign | 0x7eu", "sign | 0x7fu"),
        ("fp8's largest subnormals taken for normal", "(0.015625f)", "(0.0078125f)"),
        ("fp8's sign lost", "bits >> 24 & 0x80u", "bits >> 24 & 0x40u"),
    ],
    (NUMERIC, "write, int8", WRONG): [
        ("int8 cut instead of rounded", "rint(value)", "trunc(value)"),
        ("int8 ties rounded away from zero", "rint(value)", "round(value)"),
    ],
    (NUMERIC, "prefill, fp8", WRONG): [
        ("fp8 numbers of half their size", "(bits)) * 256.0f", "(bits)) * 128.0f"),
    ],
    (ATTENTION, "decode, soft cap", WRONG): [
        ("soft cap without log2(e)", "cap * metal::precise", "cap / LOG2_E * metal::precise"),
    ],
    (ATTENTION, "prefill", WRONG): [
        ("head's stride in blocks, not slots", "[1]) * uint(pool_shape[2]);", "[1]);"),
        ("one block too far", "[uint(position) >> shift]", "[(uint(position) >> shift) + 1]"),
    ],
    (ATTENTION, "prefill", RACE): [
        ("a lane's columns in the wrong half", "(quad & 2) * 2 +", "(quad & 2) +"),
    ],
    (ATTENTION, "decode", WRONG): [
        ("every head reads K/V head 0", "ulong(head) * uint(pool", "ulong(0) * uint(pool"),
        ("an offset's highest bit lost", "(1u << shift) - 1u", "(1u << shift) / 2u - 1u"),
    ],
    (ATTENTION, "decode", BOUNDS): [
        ("one slot too far", "shift) + offset;", "shift) + offset + 1;"),
    ],
    (ATTENTION, "decode, blocks of 32", WRONG): [
        ("block size taken for 16", "ctz(uint(pool_shape[2]))", "4"),
    ],
    (DECODE, "decode", RACE): [
        (
            "no barrier before the third walk is joined",
            f"        {_BARRIER}\n    }}\n}}",
            f"        if (next == 0) {_BARRIER}\n    }}\n}}",
        ),
        ("output row of another request", "request.first_out_row + ", ""),
        ("fence written for every K/V head", " && thread_position_in_grid.y == 0", ""),
    ],
    (DECODE, "decode", UNWRITTEN): [
        ("first walk not kept", "if (walk < walks - 1) {", "if (walk > 0 && walk < walks - 1) {"),
    ],
    (DECODE, "decode", BOUNDS): [
        ("packed rows past the last", "metal::min(in_tile, tile.packed_count - 1)", "in_tile"),
        (
            "rows and heads of a group exchanged",
            "request.first_row + row;",
            "request.first_row + packed % group;",
        ),
    ],
    (DECODE, "decode", WRONG): [
        ("blind to a row's own key", "metal::min(end, position + 1)", "metal::min(end, position)"),
        ("not causal among drafts", "metal::min(end, position + 1)", "end"),
        (
            "positions one too far",
            "position = request.first_position + packed / group;",
            "position = request.first_position + packed / group + 1;",
        ),
        ("a strip's first key for all in masks", "oldest_seen - place.row", "oldest_seen"),
        ("weight of keys that no row sees", "value = seen ? value : UNSEEN;", ""),
        ("one key past the range", "place.row, first, end - 1)", "place.row, first, end)"),
        ("one key for all of a strip", "clamp(base + s * 8 + place.row,", "clamp(base + s * 8,"),
        ("walks overlap", "first_strip + strip + walker)", "first_strip + strip)"),
        ("one round too few", "strip < strips;", "strip < strips - walks;"),
        ("half of acc not rescaled", "acc[m].thread_elements()[1] *= factor;", ""),
        ("total not rescaled", "total[e] *= rescale[e];", ""),
        (
            "maximum over half of a column",
            "metal::max(value, metal::simd_shuffle_xor(value, 16))",
            "metal::max(value, metal::simd_shuffle_xor(value, 2))",
        ),
        (
            "sum over half of a column",
            "value + metal::simd_shuffle_xor(value, 16)",
            "value + value",
        ),
        ("walks before not rescaled", "64 + e] * theirs + value", "64 + e] + value"),
        ("a walk not rescaled", "thread_elements()[e] * mine", "thread_elements()[e]"),
        ("totals of walks before not rescaled", "before[1] * theirs +", "before[1] +"),
        ("first walk left out", "WALKS > 1 && walk > 0", "WALKS > 1 && walk > 1"),
        (
            "query heads dealt out in turn, not in groups",
            "head = int(kv_head) * group + packed % group",
            "head = packed % group * key_pool_shape[0] + int(kv_head)",
        ),
        (
            "factors of columns taken for rows'",
            "transposed.get(rescale[0], rescale[1], 0)",
            "rescale[0]",
        ),
        (
            "weights not transposed",
            "transposed.get(\n                    score[s].thread_elements()[0], "
            "score[s].thread_elements()[1], e)",
            "score[s].thread_elements()[e]",
        ),
        ("even columns for odd ones", "is_second ? odd : even", "is_second ? even : odd"),
        ("the place beside taken for this", "ushort(2 * beside)", "ushort(0 * beside)"),
        ("V read from K's pool", "Values::load(value_pool", "Values::load(key_pool"),
        (
            "output in the order of the loads",
            "Of::at(m % Of::COUNT, e);",
            "Of::at(Of::COUNT - 1 - m % Of::COUNT, e);",
        ),
        (
            "Q in another order than K",
            "Of::at(m % Of::COUNT, place.row % 2)",
            "m % Of::COUNT + place.row % 2 * Of::COUNT",
        ),
        ("scores without their factor", "(key_scale[s] * scale)", "key_scale[s]"),
        ("block table row of another request", "listed ? tile.table : tile.request", "0"),
        (
            "block table rows of the wrong width",
            "uint(block_tables_shape[1])",
            "uint(block_tables_shape[0])",
        ),
        ("fence not written", "fence[i] = after[0];", ""),
    ],
    (DECODE, "decode, 128", UNWRITTEN): [
        ("no barrier before parts of scores are summed", f"{_BARRIER}\n            UN", "UN"),
    ],
    (DECODE, "decode, 128", RACE): [
        ("parts of scores written over those being read", "turn = 1 - turn;", ""),
        (
            "every part of a head written to its first",
            "Values::element(part, m / Of::COUNT, place.column)",
            "Values::element(0, m / Of::COUNT, place.column)",
        ),
    ],
    (DECODE, "decode, 128", WRONG): [
        ("one simdgroup's part of the scores only", "i < AT_ONCE", "i < 1"),
        ("scores of the first walk's keys", "((simdgroup - part) * STRIPS + s)", "s"),
        (
            "V of the head's first part",
            "DV, part, place.column, values",
            "DV, 0, place.column, values",
        ),
    ],
    (DECODE, "verify", WRONG): [
        ("rows of the first group for all", "row_group * 8 + place.column + e", "place.column + e"),
        ("laps overlap", "int strip = lap;", "int strip = 0;"),
    ],
    (DECODE, "verify", RACE): [
        (
            "row groups keep their walks in one place",
            "(row_group * SPLIT + part) * ((",
            "part * ((",
        ),
    ],
    (DECODE, "decode, latent", WRONG): [
        ("Q's rotated elements of the first part", "DV + part * 8 + place.row", "DV + place.row"),
        (
            "K's rotated elements of the first part",
            "DV + part * 8 + place.column",
            "DV + place.column",
        ),
    ],
    (DECODE, "decode, many", BOUNDS): [
        ("rows of a tile that has none", "packed_count == 0", "packed_count < 0"),
    ],
    (PREFILL, "prefill, many", BOUNDS): [
        ("rows of a tile that has none", "packed_count == 0", "packed_count < 0"),
    ],
    (DECODE, "decode, behind", WRONG): [
        ("past the end of the request", "metal::min(tile.end, request.length)", "tile.end"),
    ],
    (PREFILL, "prefill, behind", WRONG): [
        ("past the end of the request", "metal::min(tile.end, request.length)", "tile.end"),
    ],
    (DECODE, "decode, bias", WRONG): [
        ("bias of the distance beside", "own[e] - (base", "own[e] + 1 - (base"),
        ("one distance for a strip's keys", "own[e] = position - place.row", "own[e] = position"),
        ("bias one distance beyond the extent", "distance < extent ?", "distance <= extent ?"),
        ("bias without log2(e)", "? added * LOG2_E", "? added"),
        (
            "bias of another row",
            "(ulong(query_row) * num_heads + head) * uint(extent)",
            "head * uint(extent)",
        ),
    ],
    (DECODE, "decode, window", WRONG): [
        ("window one key too wide", "position - window + 1", "position - window"),
        ("keys of the window not loaded", "oldest - window + 1", "oldest - window + 3"),
        ("sink counted in every walk", "walk == 0 ? sink[e] : LOWEST", "sink[e]"),
        ("sink counted for every key of a strip", " && place.row == 0 ? 1.0f", " ? 1.0f"),
        ("sink without log2(e)", " * LOG2_E, LOWEST)", ", LOWEST)"),
    ],
    (DECODE, "decode, fp8", WRONG): [
        ("K's scale used for V", "float(value_scales[", "float(key_scales["),
        ("scale of another key", "float(key_scales[slot])", "float(key_scales[slot ^ 1])"),
    ],
    (FRAGMENTS, "decode, fp8", WRONG): [
        ("fp8 numbers of half their size", "return 256.0f;", "return 128.0f;"),
        ("fp8's sign left in the exponent", "0xbf80bf80u", "0xff80ff80u"),
        ("fp8's sign lost, of every second", "0xbf80bf80u", "0xbf803f80u"),
        ("fp8's exponent where it was", ">> short2(1)", ">> short2(0)"),
        (
            "a word's first and third code twice",
            "raw[i / 2] << 8 : raw",
            "raw[i / 2] << 8 : 256u * raw",
        ),
        ("codes in the order of their bytes", "i / 2 * 4 + i % 2 + e * 2", "i * 2 + e"),
    ],
    (FRAGMENTS, "decode, int8", WRONG): [
        ("int8's sign not inverted", "0x64806480u", "0x64006400u"),
        ("int8 one too large", "half(1152.0f)", "half(1151.0f)"),
        ("a word's second and fourth code left", "raw[i / 2] >> 8", "raw[i / 2]"),
    ],
    (FRAGMENTS, "decode, latent fp8", WRONG): [
        ("a pair's first code for both", "uint(pair) | uint(pair) << 8", "uint(pair) * 0x10001u"),
        ("a pair where no code is", "upper(spread(pair) << 8)", "upper(spread(pair))"),
    ],
    (FRAGMENTS, "decode, latent int8", WRONG): [
        ("a pair's second code for both", "lower(spread(pair))", "lower(spread(pair) >> 8)"),
    ],
    (DECODE, "decode, 80", BOUNDS): [
        ("keys past a row's end", "SIZE % (RUN * SPLIT) == 0 || at < SIZE", "true"),
        ("queries past a row's end", "LATENT || d < D ?", "true ?"),
    ],
    (DECODE, "decode, split", WRONG): [
        ("sink counted in every split", "tile.split == 0 && !listed", "!listed"),
        ("partial output divided too", "PARTIAL ? unit<C>() : ", ""),
        (
            "partial statistics swapped",
            "out_stats[at * 2] = row_top;\n        out_stats[at * 2 + 1] = row_total;",
            "out_stats[at * 2] = row_total;\n        out_stats[at * 2 + 1] = row_top;",
        ),
    ],
    (DECODE, "decode, split", RACE): [
        ("output row of another split", " + tile.split;", ";"),
        ("partial statistics from every column", "part == 0 && place.column == 0", "part == 0"),
    ],
    (DECODE, "decode, shared", WRONG): [
        ("sink counted with a shared beginning", "tile.split == 0 && !listed", "tile.split == 0"),
        ("listed rows taken for one request's", "listed ? (&request)[row].first_row : ", ""),
        ("the first row for all that are listed", "(&request)[row].first", "request.first"),
        ("rows of a request listed", "PARTIAL && settings.listed != 0", "PARTIAL"),
        ("blocks of another request", "(listed ? tile.table : tile.request)", "(tile.request)"),
        ("blocks of the first request", "(listed ? tile.table : tile.request)", "(tile.table)"),
    ],
    (DECODE, "decode, shared", RACE): [
        ("a shared part of another row", "packed / group * tile.parts + tile", "tile"),
    ],
    (PREFILL, "prefill", RACE): [
        (
            "no barrier before K is staged over V",
            f"base += KEYS) {{\n    {_BARRIER}",
            "base += KEYS) {",
        ),
        (
            "no barrier before V is staged over K",
            f"(!LATENT) {{\n        {_BARRIER}",
            "(!LATENT) {",
        ),
        ("no barrier between V staged and read", f"{_BARRIER}\n    }}\n", "}\n"),
        ("one row past the tile's last written", "in_tile < tile.pack", "in_tile <= tile.pack"),
    ],
    (PREFILL, "prefill", UNWRITTEN): [
        ("no barrier between K staged and read", f"{_BARRIER}\n\n    Matrix", "Matrix"),
        ("tile not filled with zeros past the range", "to[i] = T(0.0f);", ""),
        ("half of the tile staged", "chunk += THREADS", "chunk += 2 * THREADS"),
        ("rows staged by the wrong stride", "tile + key * STRIDE + d", "tile + key * D + d"),
        ("K read across a row, not down a column", "float(from[STRIDE])", "float(from[1])"),
    ],
    (PREFILL, "prefill", WRONG): [
        ("blind to a row's own key", "key <= position &&", "key < position &&"),
        ("not causal", "key <= position && ", ""),
        (
            "position of the tile's first row for all",
            "request.first_position + row",
            "request.first_position + tile.packed_begin / group",
        ),
        ("one key past the range", "base + key < end)", "base + key <= end)"),
        ("half of acc not rescaled", "acc[m].thread_elements()[1] *= rescale;", ""),
        ("total not rescaled", "total * rescale + sum", "total + sum"),
        ("maximum over half of a row", "simd_shuffle_xor(next, 8)", "simd_shuffle_xor(next, 1)"),
        ("sum over lanes of another row", "simd_shuffle_xor(sum, 8)", "simd_shuffle_xor(sum, 2)"),
        ("one query element twice", "query[d + 1]", "query[d]"),
        (
            "query heads dealt out in turn, not in groups",
            "head = int(kv_head) * group + packed % group",
            "head = packed % group * key_pool_shape[0] + int(kv_head)",
        ),
        ("V staged from K's pool", "value_pool, value_scales, con", "key_pool, value_scales, con"),
        ("V left as K's tile", "if (!LATENT)", "if (LATENT)"),
        ("block table row of another request", "ulong(tile.request) * uint(b", "ulong(0) * uint(b"),
        ("fence not written", "fence[i] = after[0];", ""),
    ],
    (PREFILL, "prefill, window", WRONG): [
        ("window one key too wide", "position - key < window", "position - key <= window"),
        ("sink without log2(e)", " * LOG2_E, LOWEST)", ", LOWEST)"),
    ],
    (PREFILL, "prefill, bias", WRONG): [
        ("bias of the distance beside", "clamp(position - key, 0", "clamp(position - key + 1, 0"),
        ("bias one distance beyond the extent", "key < extent ? added", "key <= extent ? added"),
        ("bias without log2(e)", "? added * LOG2_E", "? added"),
        ("bias of another row", "row_of_head * uint(extent)", "head * uint(extent)"),
    ],
    (PREFILL, "prefill, fp8", WRONG): [
        ("K's scale used for V", "value_pool, value_scales, con", "value_pool, key_scales, con"),
    ],
    (PREFILL, "prefill, 192", UNWRITTEN): [
        ("no barrier before parts of scores are summed", f"{_BARRIER}\n        UN", "UN"),
    ],
    (PREFILL, "prefill, 192", BOUNDS): [
        ("parts of scores summed past the last", "p < SPLIT", "p <= SPLIT"),
    ],
    (PREFILL, "prefill, 192", WRONG): [
        ("one simdgroup's part of the scores only", "p < SPLIT", "p < 1"),
    ],
    (PREFILL, "prefill, 192", RACE): [
        (
            "every part of a row written to its first",
            "d = part * (DV / SPLIT) + m * 8 + place.column;\n        out",
            "d = m * 8 + place.column;\n        out",
        ),
    ],
    (PREFILL, "prefill, split", RACE): [
        ("output row of another split", " + tile.split;", ";"),
        ("partial statistics from every column", "part == 0 && place.column == 0", "part == 0"),
    ],
    (PREFILL, "prefill, split", WRONG): [
        ("sink counted in every split", "tile.split == 0 ? ", "true ? "),
        (
            "partial statistics swapped",
            "out_stats[at * 2] = top;\n        out_stats[at * 2 + 1] = total;",
            "out_stats[at * 2] = total;\n        out_stats[at * 2 + 1] = top;",
        ),
    ],
    (REDUCE, "decode, split", WRONG): [
        ("one split too few", "= row.count;", "= row.count - 1;"),
        ("parts of the first row", "rows)[out_row]", "rows)[0]"),
        ("not divided", "T(joined.elements[i] / joined.total)", "T(joined.elements[i])"),
        ("half of a row's elements", "DV + 31", "DV / 2"),
        ("parts of the first head", "ulong(row.first) * num_heads + head;", "ulong(row.first);"),
        ("one part of those loaded together", "min(s + k, count", "min(s, count"),
        ("parts past the last weigh", "s + k < count ?", "true ?"),
        ("a part's total not rescaled", "(stats[k][1], weight,", "(stats[k][1], 1.0f,"),
    ],
    (REDUCE, "decode, joined", UNWRITTEN): [
        ("no barrier before walks are joined", f"{_BARRIER}\n    for", "for"),
        ("half of the walks left out", "walk < WALKS; walk +", "walk < WALKS / 2; walk +"),
    ],
    (REDUCE, "decode, joined", RACE): [
        ("every simdgroup takes all walks", "= thread_index / 32; walk", "= 0; walk"),
        ("walks kept in one place", "[(walk * N + i) * 32 + lane]", "[i * 32 + lane]"),
        ("a walk's sums kept by every lane", "if (lane == 0) {", "{"),
    ],
    (REDUCE, "decode, joined", WRONG): [
        ("largest score not kept", "top = both;", ""),
        ("totals of parts before not rescaled", "total *= before;", ""),
        ("parts before not rescaled", "elements[i] *= before;", ""),
        ("the first walk for all", "walk_elements[walk * N * 32 + d]", "walk_elements[d]"),
        ("sums of the first walk for all", "stat[0] = walk_stats[walk]", "stat[0] = walk_stats[0]"),
        ("rounds of walks overlap", "s += WALKS * AHEAD", "s += AHEAD"),
        ("walks not divided", "T(element.elements[0] / element.total)", "T(element.elements[0])"),
    ],
    (REDUCE, "decode, shared", WRONG): [
        ("shared parts left out", "own + row.num_shared;", "own;"),
        (
            "shared parts of the first head",
            "ulong(row.first_shared) * num_heads + head",
            "ulong(row.first_shared)",
        ),
        ("one shared part for all", "ulong(p - own)", "ulong(0)"),
    ],
    (REDUCE, "decode, shared", BOUNDS): [
        ("sums of others", "(mine ? stats : shared_stats)", "stats"),
        ("parts of others", "(mine ? parts : shared_parts)", "parts"),
        ("its own last part taken for a shared one", "mine = p < own", "mine = p < own - 1"),
        ("one shared part too many", "= own + row.num_shared;", "= own + row.num_shared + 9;"),
    ],
    (REDUCE, "decode, split", BOUNDS): [
        ("one split too many", "= row.count;", "= row.count + 1;"),
    ],
    (REDUCE, "prefill, split", WRONG): [
        ("parts not rescaled", "(found[k][i], weight,", "(found[k][i], 1.0f,"),
    ],
    (WRITE, "write, fp8", BOUNDS): [
        ("slot one past the pool's last", "slot < num_slots", "slot <= num_slots"),
        ("V's rows of K's size", "(value_pool) + target * VALUE", "(value_pool) + target * KEY"),
        ("one element past a row", "if (first + (SIZE % RUN ? j : 0) <", "if (first <="),
    ],
    (WRITE, "write, fp8", WRONG): [
        ("pool's slots before heads", "head * num_slots + slot", "slot * key_pool_shape[0] + head"),
        (
            "rows' heads before rows",
            "static_cast<ulong>(row) * key_pool_shape[0] + head",
            "static_cast<ulong>(head) * threads_per_grid.z + row",
        ),
        ("slots of a single block", "static_cast<ulong>(key_pool_shape[1]) *", "1ul *"),
        (
            "V's scale where K's belongs",
            "<device bfloat16_t*>(value_scales)",
            "<device bfloat16_t*>(key_scales)",
        ),
        ("largest of a lane, not of the row", "(simd_max(largest))", "(largest)"),
        (
            "scale not rounded before it is judged",
            "divisor_for(scale));\n    if",
            "largest / top);\n    if",
        ),
        ("codes by another scale than the row's", "divisor = divisor_for(best)", "divisor = 1.0f"),
        ("first scale kept", "if (error < least)", "if (error + 1u == 0u)"),
        ("last scale kept", "if (error < least)", ""),
        ("last of equally good scales", "error < least", "error <= least"),
        ("least error not kept", "least = error;", ""),
        ("largest element at every second code only", "top -= 32.0f", "top -= 64.0f"),
        ("last scale not tried", "top >= 256.0f", "top > 256.0f"),
        ("error of a lane, not of the row", "return metal::simd_sum(error)", "return error"),
        ("errors summed, not their squares", "(share * share)", "(metal::abs(share))"),
        ("errors in units too large", "* 16384.0f", "* 16.0f"),
        ("values not written", "if (HAS_VALUES)", "if (!HAS_VALUES)"),
        ("fence not whole", "lane < 8", "lane < 7"),
    ],
    (WRITE, "write, fp8", RACE): [
        ("scale written by every lane", "if (lane == 0)", ""),
        ("fence written for every row", "row == 0 && lane < 8", "lane < 8"),
    ],
    (WRITE, "write, int8", WRONG): [
        ("row of zeros divided by zero", "divisor > 0.0f ? divisor : 1.0f", "divisor"),
    ],
    (WRITE, "write, rotated", WRONG): [
        ("turned the other way", "own * cosine - other * sine", "own * cosine + other * sine"),
        ("second of a pair as the first", "second ? other * sine", "!second ? other * sine"),
        ("sine where the cosine belongs", "fast::cos(turn)", "fast::sin(turn)"),
        ("halves' pairs counted on", "place - (second ? HALF : 0)", "place"),
        ("frequencies of half as many pairs", "<float>(DIMS / 2)", "<float>(DIMS / 4)"),
        ("frequencies that grow", "exp2(-share * base)", "exp2(share * base)"),
        ("all rows at the position of the first", "(positions[row])", "(positions[0])"),
        ("positions not scaled", "= angles[0] * static_cast", "= static_cast"),
        (
            "what is behind the rotated turned too",
            "index < FIRST + DIMS;",
            "index < FIRST + 2 * DIMS;",
        ),
        ("not rounded before it is coded", "static_cast<T>(now)", "now"),
        ("values turned too", "using AsItIs = Row<T, 0, 0, false, false>", "using AsItIs = Turned"),
        ("queries not turned", "Turned{query,", "AsItIs{query,"),
        ("keys not turned", "Turned{key,", "AsItIs{key,"),
    ],
    (WRITE, "write, rotated", RACE): [
        ("queries of a single head", "* queries_shape[1] + query_head)", "* queries_shape[1])"),
    ],
    (WRITE, "write, rotated", BOUNDS): [
        ("a query head too many", "= head - key_pool_shape[0];", "= head;"),
        ("a query's row by K/V heads", "row) * queries_shape[1]", "row) * threads_per_grid.y"),
    ],
    (WRITE, "write, rotated by a list", WRONG): [
        ("frequencies taken for their inverse", "(1.0f / frequencies[pair])", "frequencies[pair]"),
        ("neighbors taken for halves", "TRADITIONAL ? place % 2 != 0 :", "false ? false :"),
    ],
    (WRITE, "write, rotated by a list", BOUNDS): [
        (
            "first elements from the tail",
            "index < FIRST ? elements + index :",
            "index < 0 ? elements :",
        ),
        ("partner far away", "TRADITIONAL ? 1 : HALF", "TRADITIONAL ? 8 * HALF : HALF"),
        (
            "an element's frequency, not a pair's",
            "TRADITIONAL ? place / 2",
            "TRADITIONAL ? place",
        ),
        ("tails' rows as long as keys'", "source * (KEY_SIZE - FIRST)", "source * KEY_SIZE"),
        ("keys' rows as long as the pool's", "(FIRST > 0 ? FIRST : KEY_SIZE)", "KEY_SIZE"),
    ],
    (GATHER, "gather", BOUNDS): [
        ("block one past the pool's last", "block < num_blocks", "block <= num_blocks"),
        ("requests taken for heads", "z / num_requests", "z % pool_shape[0]"),
        ("heads before the first one asked for", "heads[0] + thread", "heads[0] - 2 + thread"),
    ],
    (GATHER, "gather", RACE): [
        ("threads' runs overlap", "x * RUN;", "x * (RUN - 4);"),
        ("contexts without their columns", "z) * num_columns + column;", "z) * num_columns;"),
        ("fence written for every column", "z == 0 && column == 0", "z == 0"),
    ],
    (GATHER, "gather", WRONG): [
        ("scale of a block's first slot", "scales[first_slot + offset]", "scales[first_slot]"),
        ("block table row of another request", "[request * num_columns + column]", "[column]"),
        ("elements of a run left out", "i < RUN; i += 4", "i < RUN - 4; i += 4"),
        ("fence not whole", "i < 8", "i < 7"),
        ("a head's blocks by the wrong stride", "(head) * num_blocks + block)", "(head) + block)"),
        ("the first head, whichever is asked for", "heads[0] + thread", "thread"),
        ("what lies past the request's end", "slot < bounds", "slot <= bounds"),
        ("what lies before the window", "slot >= bounds[request * 2]", "slot >= 0"),
        ("bounds of another request", "bounds[request * 2 + 1]", "bounds[1]"),
        ("slots counted in each block anew", "column * block_size + offset;", "offset;"),
        (
            "codes in another order",
            "<uint8_t>(raw[i / 4] >> (i % 4 * 8))",
            "<uint8_t>(raw[i / 4] >> (24 - i % 4 * 8))",
        ),
        ("not scaled", "(raw, i + j)) * scale", "(raw, i + j))"),
    ],
    (GATHER, "gather, values", WRONG): [
        ("bits copied as of another dtype", "if (SAME)", "if (!SAME)"),
        ("halves in another order", "(raw[i / 2])[i % 2]", "(raw[i / 2])[1 - i % 2]"),
    ],
    (BLOCKS, "copy", RACE): [
        ("only the first head copied", "static_cast<ulong>(head)", "static_cast<ulong>(0)"),
        ("all copied onto the first target", "targets[pair]", "targets[0]"),
        ("threads' runs overlap", "x * RUN;", "x * (RUN - 1);"),
        ("fence written for every pair", "head == 0 && pair == 0", "head == 0"),
    ],
    (BLOCKS, "copy", WRONG): [
        ("source one block off", "sources[pair]", "sources[pair] + 1"),
    ],
    (BLOCKS, "zero", WRONG): [
        ("copied, not cleared", "COPY ? source[i]", "true ? source[i]"),
        ("fence not whole", "i < 8", "i < 7"),
    ],
    (STATES, "convolution", WRONG): [
        (
            "heads of K next to each other",
            "(head * num_blocks + block) * OF_K",
            "(head + block) * OF_K",
        ),
    ],
    (STATES, "convolution", RACE): [
        ("each head's state begins anew", "start + at % OF_KEYS", "start"),
        ("each head of V begins anew", "start + behind % OF_VALUES", "start"),
    ],
    (STATES, "convolution", BOUNDS): [
        (
            "V instead of K's last head",
            "at < OF_KEYS * NUM_HEADS",
            "at < OF_KEYS * (NUM_HEADS - 1)",
        ),
        ("V from its own first byte", "at - OF_KEYS * NUM_HEADS", "at - OF_KEYS"),
        ("head of K by V's size", "at / OF_KEYS;", "at / (OF_KEYS / 2);"),
        ("head of V by elements", "behind / OF_VALUES;", "behind / VALUES;"),
    ],
    (STATES, "recurrence, keys", RACE): [
        ("V in K's pool", "const_cast<device P*>(value_pool)", "const_cast<device P*>(key_pool)"),
    ],
    (STATES, "recurrence, keys", BOUNDS): [
        ("V of another block", "block) * OF_VALUES", "block + 1) * OF_VALUES"),
    ],
    (CONVOLUTION, "convolution", WRONG): [
        ("kept rows taken for rows", "(is_kept ? kept : rows)", "rows"),
        ("one kept row too many", "number < num_kept;", "number <= num_kept;"),
        ("rows counted with kept ones", "number : number - num_kept", "number : number"),
        ("a state's inputs moved by one", "number + TAPS - 1 == j", "number + TAPS == j"),
        ("a state's first input only", "== j ? state[j] : found", "== j ? state[0] : found"),
        ("channels' inputs side by side", "(j * channels + channel)", "(j + channel * 3)"),
        ("a state one input late", "count + j - (TAPS - 1))", "count + j - TAPS)"),
        ("a state one input early", "count + j - (TAPS - 1))", "count + j - (TAPS - 2))"),
        (
            "first kept row ignored",
            "kept + static_cast<ulong>(sequence.first_kept) *",
            "kept + 0 *",
        ),
        ("state at position 0", " && sequence.position > 0;", ";"),
        (
            "state read where it is written",
            "num_blocks, sequence.read));",
            "num_blocks, sequence.write));",
        ),
        ("no state", "    given.state[j] = static_cast<float>(*state_of", "    (void)(*state_of"),
        ("bias left out", "float sum = offset;", "float sum = 0.0f;"),
        ("weights in reverse", "factors[j] * newest[j]", "factors[TAPS - 1 - j] * newest[j]"),
        ("weights of taps first", "weight[channel * TAPS + j]", "weight[j * channels + channel]"),
        ("taps not moved on", "newest[j] = newest[j + 1];", ""),
        ("taps of tiles one row late", "first + j - TAPS);", "first + j - TAPS - 1);"),
        ("taps of the request's first rows in each tile", "num_kept + first + j", "num_kept + j"),
        ("kept rows left out before rows", "given.at(sequence.num_kept + first", "given.at(first"),
        (
            "the last certain row kept too",
            "sequence.keep_at + row - sequence.num_certain;",
            "sequence.keep_at + row - sequence.num_certain + 1;",
        ),
        (
            "drafts change the state",
            "sequence.num_kept + sequence.num_certain;",
            "sequence.num_kept + sequence.num_rows;",
        ),
        (
            "state without kept rows",
            "= sequence.num_kept + sequence.num_certain;",
            "= sequence.num_certain;",
        ),
        ("full blocks by the wrong width", "* blocks_shape[1]", "* blocks_shape[0]"),
        ("full blocks from the request's first", "sequence.position / BLOCK_SIZE;", "0;"),
        (
            "blocks end where steps begin",
            "BLOCK_SIZE - sequence.position % BLOCK_SIZE;",
            "BLOCK_SIZE;",
        ),
        (
            "a block that ends with the last certain input left out",
            "count <= certain;",
            "count < certain;",
        ),
        ("one full block only", "count += BLOCK_SIZE, index++", "count += 1 << 20, index++"),
        ("nobody's full blocks", "if (block != 0 && (", "if (("),
        ("block 0 for want of one", "  if (sequence.write != 0) {", "  {"),
        ("no state after the last certain input", "given, certain, channel", "given, 0, channel"),
        ("half a tile", "first + TILE_ROWS,", "first + TILE_ROWS / 2,"),
        ("nothing cleared", "if (block != read) {", "if (false) {"),
        ("cleared wherever states are written", "if (block != read) {", "{"),
        (
            "not cleared where a request begins",
            "sequence.position > 0 ? sequence.read : 0;",
            "sequence.read;",
        ),
        ("behind the part, nothing cleared", "END, (END + 15) / 16 * 16", "0, 0"),
        ("whole runs alone cleared", "bytes[i] = 0;", ""),
        ("runs cleared in part alone", "bytes = metal::vec<uint, 4>(0);", "bytes;"),
        ("fence not written", "fence[i] = 0;", ""),
    ],
    (CONVOLUTION, "convolution", RACE): [
        ("cleared from the run's first byte", "uint i = from % 16;", "uint i = 0;"),
        (
            "kept rows of all requests from 0",
            "const ulong to = sequence.keep_at + row",
            "const ulong to = row",
        ),
        ("output rows of the first request", "sequence.first_row + row) *", "row) *"),
        ("full blocks of the first request", "static_cast<ulong>(request) * blocks_shape[1]", "0"),
        ("each tile writes states", "if (first == 0) {", "{"),
        ("fence written by each tile", "if (thread_position_in_grid.y == 0) {", "{"),
        (
            "tiles to the request's end",
            "metal::min(first + TILE_ROWS, sequence.num_rows)",
            "sequence.num_rows",
        ),
    ],
    (CONVOLUTION, "convolution", BOUNDS): [
        ("runs of K cleared behind the block", "run * 16 < to;", "run * 16 < 2 * to;"),
        ("rows of a tile that has none", "first >= sequence.num_rows", "false"),
        (
            "tiles that are full",
            "metal::min(first + TILE_ROWS, sequence.num_rows)",
            "first + TILE_ROWS",
        ),
        ("inputs before the first", "number >= 0", "number >= 1 - TAPS"),
    ],
    (RECURRENCE, "recurrence, delta", WRONG): [
        ("no delta rule", "DELTA ? product", "!DELTA ? product"),
        ("delta of the state before its decay", "state[i][j] *= decay[i][j];\n", "\n"),
        (
            "rate of the value alone",
            "rate * (static_cast<float>(value) - known)",
            "rate * static_cast<float>(value) - known",
        ),
        ("sum of a lane", "sum += metal::simd_shuffle_xor(sum, step);", ""),
        ("sum of half the lanes", "step < LANES; step *= 2", "step < LANES / 2; step *= 2"),
        ("sum of another row's lanes too", "step < LANES; step *= 2", "step <= LANES; step *= 2"),
        ("half of a lane's elements", "sums[RUN / 2] + sums[RUN - 1]", "0"),
        ("first run of a lane only", "sums[j] += a[i][j] * b[i][j];", ""),
        (
            "elements past the row's end",
            "(i, lane) ? element : 0.0f;",
            "(i, lane) ? element : element;",
        ),
        ("kept rows taken for rows", "(is_kept ? kept_keys : keys)", "keys"),
        ("values of kept rows taken for rows'", "(is_kept ? kept_values : values)", "values"),
        ("rates of kept rows taken for rows'", "(is_kept ? kept_rates : rates)", "rates"),
        ("decays of kept rows taken for rows'", "is_kept ? kept_decays : decays", "decays"),
        (
            "first kept row ignored",
            "(is_kept ? first_kept : first_row) + t",
            "(is_kept ? 0 : first_row) + t",
        ),
        ("state at position 0", "if (start > 0 && is_there)", "if (is_there)"),
        ("state read where it is written", "(states, sequence.read, n", "(states, write, n"),
        (
            "rates of the first head",
            "(is_kept ? kept_rates : rates)[row * HV + head]",
            "(is_kept ? kept_rates : rates)[row * HV]",
        ),
        ("decays of the first head", "decays_of_row[row * HV + head]", "decays_of_row[row * HV]"),
        (
            "drafts change the state",
            "num_kept + sequence.num_certain;",
            "num_kept + sequence.num_rows;",
        ),
        ("full blocks by the wrong width", "* blocks_shape[1]", "* blocks_shape[0]"),
        ("blocks end where steps begin", "position % BLOCK_SIZE == 0;", "t % BLOCK_SIZE == 0;"),
        ("full blocks one too far", "position / BLOCK_SIZE - 1]", "position / BLOCK_SIZE]"),
        ("no full blocks", "if (full != 0 && full != own && is_there)", "if (false)"),
        (
            "nobody's full blocks",
            "if (full != 0 && full != own && is_there)",
            "if (is_full && is_there)",
        ),
        ("block 0 for want of one", "if (own != 0 && is_there)", "if (t == certain && is_there)"),
        ("state after the first token", "t == certain ? write : 0", "t == 1 ? write : 0"),
        ("y before the state is new", "product<LANES>(state, query)", "product<LANES>(state, key)"),
        ("drafts kept one too far", "keep_at + t - certain;", "keep_at + t - certain + 1;"),
        ("the value kept as its change", "+ n] = value;", "+ n] = static_cast<V>(change);"),
        ("fence not written", "fence[thread_position_in_grid.x] = 0;", ""),
        ("only the first run of a state", "store_run(states.at", "if (i == 0) store_run(states.at"),
        ("states of two rows", "static_cast<float>(four[j]);", "static_cast<float>(four[0]);"),
    ],
    (RECURRENCE, "recurrence, delta", RACE): [
        ("kept rows of all requests from 0", "const ulong to = keep_at + t", "const ulong to = t"),
        ("kept rows skipped in rows", "sequence.first_row - num_kept;", "sequence.first_row;"),
        ("heads share keys in turn", "head / (HV / HK)", "head % HK"),
        ("full blocks of the first request", "static_cast<ulong>(request) * blocks_shape[1]", "0"),
        ("runs past the end of a state's row", "i * LANES + lane < DK / RUN", "true"),
        ("fence written for each request", "request == 0 && ", ""),
        ("rows past the last written too", "place == n;", "true;"),
        ("states read by lanes that have none", "start > 0 && is_there", "start > 0"),
        ("outputs of each lane", "is_there && lane == 0) {", "is_there) {"),
        (
            "keys kept for each value head",
            "if (is_first && head % (HV / HK) == 0)",
            "if (is_first)",
        ),
        (
            "keys kept for each row",
            "if (is_first && head % (HV / HK) == 0)",
            "if (head % (HV / HK) == 0)",
        ),
        (
            "rates kept for each row",
            "if (lane == 0 && is_first) {\n      next_r",
            "if (lane == 0) {\n      next_r",
        ),
        ("one output a head", "outputs[row * (HV * DV) + n]", "outputs[row * (HV * DV) + head]"),
    ],
    (RECURRENCE, "recurrence, delta", BOUNDS): [
        ("runs past the end of a row", "metal::min(run, uint(DK / RUN - 1)) : run", "run : run"),
        ("a value for each lane", "* (HV * DV) + n];", "* (HV * DV) + thread_position_in_grid.x];"),
        ("full blocks past a request's", "position / BLOCK_SIZE - 1]", "position + 50]"),
    ],
    (RECURRENCE, "recurrence, keys", WRONG): [
        (
            "decays of the first head's keys",
            "decays_of_row + (row * HV + head) * DK",
            "decays_of_row + row * HV * DK",
        ),
        ("delta rule in a state-space model", "DELTA ? product", "true ? product"),
        (
            "state decays after its change",
            "state[i][j] + change * key[i][j]",
            "state[i][j] + change * key[i][j] * decay[i][j]",
        ),
    ],
    (RECURRENCE, "recurrence, keys", RACE): [
        ("decays kept for each row", "DECAYS == 1 && is_first", "DECAYS == 1"),
    ],
    (RECURRENCE, "recurrence, rates", WRONG): [
        ("decays of the rate alone", "exp(rate * log_rate[i][j])", "exp(rate)"),
        ("rates of decay of the first head", "log_rates + head * DK", "log_rates"),
    ],
    (READ_STATES, "read states", WRONG): [
        ("state of another block", "blocks[state]", "blocks[0]"),
        ("heads before blocks", "/ size * num_blocks + block", "/ size + block * NUM_HEADS"),
        ("V read from K's pool", "(in_keys ? key_pool : value_pool)", "key_pool"),
        ("an element of a run left out", "i < RUN", "i < RUN - 1"),
        ("numbers converted, not their bits", "as_type<U>(source[i])", "static_cast<U>(source[i])"),
        ("fence not whole", "i < 8", "i < 7"),
    ],
    (READ_STATES, "read states", BOUNDS): [
        ("parts of a block taken for blocks", "key_pool_shape[1] / SPLIT", "key_pool_shape[1]"),
        ("V read by K's size", "in_keys ? KEYS : VALUES", "KEYS"),
        ("V read from its middle", "first - KEYS * NUM_HEADS", "first - KEYS"),
    ],
    (READ_STATES, "read states", RACE): [
        ("all states onto the first", "static_cast<ulong>(state) * WIDTH", "0"),
        ("threads' runs overlap", "x * RUN;", "x * (RUN - 1);"),
        ("fence written for every state", "if (state == 0)", ""),
    ],
    (WRITE_STATES, "write states", WRONG): [
        ("heads before blocks", "/ size * num_blocks + block", "/ size + block * NUM_HEADS"),
        ("an element of a run left out", "i < RUN", "i < RUN - 1"),
        ("state of another request", "static_cast<ulong>(state) * WIDTH", "0"),
        ("rest of the block left as it was", "target[i] =", "if (first < WIDTH) target[i] ="),
        ("numbers converted, not their bits", "as_type<T>(source[i])", "static_cast<T>(source[i])"),
        ("fence not whole", "i < 8", "i < 7"),
    ],
    (WRITE_STATES, "write states", BOUNDS): [
        ("rest of the block filled from behind the state", "first < WIDTH ?", "true ?"),
        ("parts of a block taken for blocks", "key_pool_shape[1] / SPLIT", "key_pool_shape[1]"),
        ("V written by K's size", "in_keys ? KEYS : VALUES", "KEYS"),
    ],
    (WRITE_STATES, "write states", RACE): [
        ("all states into the first block", "blocks[state]", "blocks[0]"),
        ("V written to K's pool", "(in_keys ? key_pool : value_pool)", "(key_pool)"),
        ("threads' runs overlap", "x * RUN;", "x * (RUN - 1);"),
        ("fence written for every state", "if (state == 0)", ""),
    ],
}

# Offsets of fewer than 64 bits: only detectable in pools of more than 2^31 or 2^32 elements.
_OVERFLOWS: _Faults = {
    (DECODE, "decode", WRONG): [
        ("offset in 32 bits", "pool + slot * D;", "pool + uint(slot * D);"),
    ],
    (DECODE, "decode", BOUNDS): [
        ("offset in 31 bits", "pool + slot * D;", "pool + int(slot * D);"),
    ],
    (PREFILL, "prefill", WRONG): [
        ("slot in 32 bits", "const ulong slot = context", "const uint slot = context"),
    ],
    (PREFILL, "prefill", BOUNDS): [
        ("offset in 31 bits", "pool + slot * row_size", "pool + int(slot * row_size)"),
        ("slot in 31 bits", "const ulong slot = context", "const int slot = context"),
    ],
    (READ_STATES, "read states", WRONG): [
        ("offset in 32 bits", "const ulong start", "const uint start"),
    ],
    (READ_STATES, "read states", BOUNDS): [
        ("offset in 31 bits", "const ulong start", "const int start"),
    ],
    (WRITE_STATES, "write states", WRONG): [
        ("offset in 32 bits", "const ulong start", "const uint start"),
    ],
    (WRITE_STATES, "write states", BOUNDS): [
        ("offset in 31 bits", "const ulong start", "const int start"),
    ],
    (WRITE, "write", WRONG): [
        ("offset in 32 bits", "(key_pool) + target * KEY", "(key_pool) + uint(target) * KEY"),
    ],
    (WRITE, "write", BOUNDS): [
        (
            "offset in 31 bits",
            "(key_pool) + target * KEY_SIZE",
            "(key_pool) + int(target * KEY_SIZE)",
        ),
    ],
    (GATHER, "gather", WRONG): [
        ("offset in 32 bits", "pool + first_slot * HEAD", "pool + uint(first_slot) * HEAD"),
    ],
    (GATHER, "gather", BOUNDS): [
        (
            "offset in 31 bits",
            "first_slot * HEAD_SIZE + first)",
            "int(first_slot * HEAD_SIZE) + first)",
        ),
        ("slot in 31 bits", "const ulong first_slot", "const int first_slot"),
    ],
    (STATES, "convolution", WRONG): [
        (
            "offset in 32 bits",
            "const ulong start = (head * num_blocks + block) * OF_KEYS",
            "const uint start = (head * num_blocks + block) * OF_KEYS",
        ),
    ],
    (BLOCKS, "copy", WRONG): [
        ("source's offset in 32 bits", "(head_start + s", "static_cast<uint>(head_start + s"),
        ("target's offset in 32 bits", "(head_start + t", "static_cast<uint>(head_start + t"),
    ],
}


def _listed(faults: _Faults) -> tuple[Mutant, ...]:
    return tuple(Mutant(*where, *fault) for where, each in faults.items() for fault in each)


MUTANTS, OVERFLOWS = _listed(_FAULTS), _listed(_OVERFLOWS)


def table() -> list[tuple[str, str, str]]:
    """Returns (what, file, caught by) of every fault, in the order of the files."""
    files = list(dict.fromkeys(mutant.file for mutant in MUTANTS))
    every = sorted((*MUTANTS, *OVERFLOWS), key=lambda mutant: files.index(mutant.file))
    return [(mutant.what, mutant.file, mutant.caught_by) for mutant in every]
