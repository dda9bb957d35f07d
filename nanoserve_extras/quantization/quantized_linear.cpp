// x @ weight.T for a weight of integers: int8 by row, or 4 or 8 bits in groups.
//
// The loop is cpu.cpp's `multiply` with integers. A panel has 16 outputs and all inputs; a unit is
// two neighbouring inputs. A unit of a panel becomes 32 numbers of 16 bits in a register, and one
// instruction multiplies them by a row's unit and adds both products to 16 sums of 32 bits:
//
//     8 bits: panel (units, 16, 2)       rows (units, R), two int16 each         sums (R, 16 P)
//     unit 0   o0 o0 o1 o1 ... o15 o15   unit 0   r0 r1 .. rR     block scale    r0  o0 o1 ... o15
//     unit 1   o0 o0 o1 o1 ... o15 o15   unit 1   r0 r1 .. rR     of r0, r1 ..   r1
//
// For this the activations are rounded to 16-bit integers, too: each block of 512 inputs of a row
// has its own scale, the largest number in it over 32767. That keeps 15 bits of the largest number;
// bfloat16 has 8. Why 512: a block's sum is at most 512 * 128 * 32767, just below 2^31. After each
// block the sums are scaled and added up in float32. Zeros fill a panel's last units, so that a
// loop can take four at a time.
//
// In groups, weight = q * s + m, and the inputs of a group share s and m. So a group adds to a
// result s * (sum of q x) + m * (sum of x), and the last sum is the same for all outputs. A panel
// is one stream, for each group the head and then the numbers:
//
//     head       16 s, 16 m in float16, a line of 64 bytes; or a line of 16 s in float32, and
//                perhaps one of 16 m. int8 by row: one group, a line of s
//     8 bits     as above
//     4 bits     lines of 64 bytes, 32 bits for each output, which are four units: in the low half
//                of an output's word their first inputs, in the high half their second ones. A
//                shift and a mask make 16 bits of any of them: shifted by 4, the low half of
//                    q7 q5 q3 q1 q6 q4 q2 q0      (the highest bits first)
//                has q2 and the high half q3: unit 1
//
// After each group the sums are scaled. Groups divide 512, so a row has one scale in each.
//
// Sums of integers are exact, and blocks are added in order, so a row's result depends neither on
// the threads nor on the other rows. The road not taken: int8 activations would be twice as fast if
// products were the limit and not bytes, but they change the text (W8A8); 16 bits do not.
//
// On matrix tiles panels are widened to bfloat16, once for all rows of a portion, and activations
// are not rounded. An int8 is exact in bfloat16; in groups, q * s + m is rounded to bfloat16.
//
// Shapes and dtypes are checked in build.py. Built by build.py.

#include "matrix_tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr long BLOCK = 512, BLOCK_UNITS = BLOCK / 2;
#if defined(__AVX512BW__)
constexpr int LANES = 16, MAX_ROWS[] = {0, 16, 14};  // rows of a tile of 1 panel, of 2:
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_ROWS[] = {0, 6, 2};  // as many sums as there are registers
#else
constexpr int LANES = 4, MAX_ROWS[] = {0, 2, 1};
#endif
constexpr int VECTORS = PANEL / LANES;  // of a panel's line
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(4 * LANES)));

// 2 * LANES numbers of 8 bits, widened; those of the next unit of a line of 4 bits; and what they add
// to the sums. And LANES numbers of float16.
#if defined(__AVX512BW__)
typedef __m512i Wide;
inline Wide widen(const uint8_t *at) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at));
}
inline void multiply_add(Ints &sum, Wide line, int32_t row) {
#if defined(__AVX512VNNI__)
    sum = (Ints)_mm512_dpwssd_epi32((__m512i)sum, line, _mm512_set1_epi32(row));
#else
    sum += (Ints)_mm512_madd_epi16(line, _mm512_set1_epi32(row));
#endif
}
inline Vector halves_at(const uint8_t *at) {
    // GCC 12 warns of the form without a mask, -Wmaybe-uninitialized.
    return (Vector)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)at));
}
#elif defined(__AVX2__)
typedef __m256i Wide;
inline Wide widen(const uint8_t *at) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
}
inline void multiply_add(Ints &sum, Wide line, int32_t row) {
    sum += (Ints)_mm256_madd_epi16(line, _mm256_set1_epi32(row));
}
inline Vector halves_at(const uint8_t *at) {
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}
#else
struct Wide { Ints first, second; };  // each output's first input, and its second
inline Wide widen(const uint8_t *at) {
    Wide line;
    for (int i = 0; i < LANES; i++)
        line.first[i] = int8_t(at[2 * i]), line.second[i] = int8_t(at[2 * i + 1]);
    return line;
}
inline Wide take_unit(Bits &line) {
    const Bits unit = line;
    line >>= 4;
    return {(Ints)(unit & 15), (Ints)(unit >> 16 & 15)};
}
inline Ints first_of(const Wide &unit) { return unit.first; }
inline Ints second_of(const Wide &unit) { return unit.second; }
inline void multiply_add(Ints &sum, const Wide &line, int32_t row) {
    sum += line.first * int32_t(int16_t(row)) + line.second * (row >> 16);
}
inline Vector halves_at(const uint8_t *at) {
    Vector numbers;
    for (int i = 0; i < LANES; i++) {
        uint16_t half;
        std::memcpy(&half, at + 2 * i, 2);
        // The exponent's bias is 15 there and 127 here.
        const float size = as_float(uint32_t(half & 0x7fff) << 13) * 0x1p112f;
        numbers[i] = half & 0x8000 ? -size : size;
    }
    return numbers;
}
#endif
#if defined(__AVX2__)
inline Wide take_unit(Bits &line) {
    const Halves unit = (Halves)line;
    line = (Bits)(unit >> 4);
    return (Wide)(unit & 15);
}
inline Ints first_of(Wide unit) { return (Ints)unit << 16 >> 16; }  // with their sign
inline Ints second_of(Wide unit) { return (Ints)unit >> 16; }
#endif

// Two numbers of bfloat16 a word, to the nearest, ties to even. None of them is NaN.
inline Bits narrow_pair(Vector first, Vector second) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t ORDER[] = {
        0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Bits)_mm512_permutexvar_epi16(
        _mm512_load_si512(ORDER), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    const Bits low = (Bits)first, high = (Bits)second;
    return (low + 0x7fff + (low >> 16 & 1)) >> 16 |
           ((high + 0x7fff + (high >> 16 & 1)) & 0xffff0000u);
#endif
}

template <class X> X at(const void *place) { X x; std::memcpy(&x, place, sizeof x); return x; }
inline void add_scaled(Vector sums, float scale, float *out) {
    Vector total = at<Vector>(out);
    total += sums * scale;
    std::memcpy(out, &total, sizeof total);
}

// The layout of a panel. floats: float32 numbers in a group's head, for each output; 0 means two of
// float16. group: units of a group; for int8 by row, whose scales the caller applies, units of a
// block.
struct Groups {
    long group;
    int floats;
    bool by_row;
    long head() const { return (floats == 2 ? 2 : 1) * PANEL * 4; }  // bytes
    // Scales of LANES outputs of a panel, and their minima; v: which of its vectors.
    void read(const uint8_t *head, int v, Vector &scales, Vector &minima) const {
        const uint8_t *const place = head + v * 4 * LANES;
        if (floats == 0) {
            scales = halves_at(head + v * 2 * LANES);
            minima = halves_at(head + (PANEL + v * LANES) * 2);
        } else {
            scales = at<Vector>(place);
            minima = floats == 2 ? at<Vector>(place + 4 * PANEL) : Vector{};
        }
    }
};

// ------------------------------------------------------------------- the loop

constexpr int UNITS = 4;  // of a line
template <int BITS> constexpr long LINE = UNITS * PANEL * BITS / 4;  // bytes
constexpr int WIDENED = 16;  // bits of numbers of 4 bits that are widened for many tiles of rows

// A tile of rows as whole numbers: (units, R), the scales of their blocks, (blocks, R), and the sums
// of their groups, (groups, R).
struct Rows {
    const int32_t *units;
    const float *scales, *sums;
};

// out (R, 16 * P) = rows times P panels. next: what is read afterwards, which is fetched meanwhile;
// or null. P is 1 unless numbers are int8 by row.
//
// An addition to a sum must wait for the one before. Few rows have no other work meanwhile, so they
// use several sums for each output, which are added up at the end: CHAINS. (docs/log, 2026-11-27.)
template <int BITS, bool GROUPED, int R, int P>
void multiply(Rows rows, const uint8_t *const *panels, const uint8_t *const *next, long units,
              const Groups &groups, float *out, bool add) {
    constexpr int WIDTH = P * VECTORS;  // vectors of a row's sums
    constexpr int CHAINS = R == 1 ? UNITS : LANES == 16 && R * P <= 8 ? 2 : 1;
    // Units that are unrolled. With AVX2's 16 registers more of them would be spilled.
    constexpr int TOGETHER = BITS == 4 && LANES == 16 ? UNITS : CHAINS;
    if (!add) std::memset(out, 0, R * P * PANEL * sizeof(float));
    long place = GROUPED ? 0 : groups.head();  // in a panel
    Vector block[R * WIDTH] = {};
    for (long first = 0, end; first < units; first = end) {
        end = std::min(first + groups.group, units);
        Vector weight_scales[WIDTH] = {}, minima[WIDTH] = {};
        if constexpr (GROUPED) {
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                groups.read(panels[i / VECTORS] + place, i % VECTORS, weight_scales[i], minima[i]);
            place += groups.head();
        }
        Ints sums[CHAINS * R * WIDTH];
#pragma GCC unroll 64
        for (int i = 0; i < CHAINS * R * WIDTH; i++) sums[i] = Ints{};
        for (long u = first; u < end; u += UNITS, place += LINE<BITS>) {
            if (next)
                for (int p = 0; p < P; p++)
                    for (long byte = 0; byte < LINE<BITS>; byte += 64)
                        __builtin_prefetch(next[p] + place + byte);
            Bits line[WIDTH] = {};  // Units of 8 bits are read one by one.
            if constexpr (BITS == 4) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++)
                    line[i] = at<Bits>(panels[i / VECTORS] + place + i % VECTORS * 4 * LANES);
            }
#pragma GCC unroll 1
            for (int k = 0; k < UNITS; k += TOGETHER) {
#pragma GCC unroll 4
                for (int c = 0; c < TOGETHER; c++, rows.units += R) {
                    Wide unit[WIDTH];
#pragma GCC unroll 16
                    for (int i = 0; i < WIDTH; i++)
                        if constexpr (BITS == 4) unit[i] = take_unit(line[i]);
                        else if constexpr (BITS == 16)
                            unit[i] = at<Wide>(panels[i / VECTORS] + place +
                                               ((k + c) * VECTORS + i % VECTORS) * sizeof(Wide));
                        else unit[i] = widen(panels[i / VECTORS] + place +
                                             ((k + c) * VECTORS + i % VECTORS) * 2 * LANES);
#pragma GCC unroll 64
                    for (int i = 0; i < R * WIDTH; i++)
                        multiply_add(sums[c % CHAINS * R * WIDTH + i], unit[i % WIDTH],
                                     rows.units[i / WIDTH]);
                }
            }
        }
#pragma GCC unroll 64
        for (int i = R * WIDTH; i < CHAINS * R * WIDTH; i++) sums[i % (R * WIDTH)] += sums[i];
        const bool ends_block = !GROUPED || end % BLOCK_UNITS == 0 || end == units;
#pragma GCC unroll 64
        for (int i = 0; i < R * WIDTH; i++) {
            Vector sum = __builtin_convertvector(sums[i], Vector);
            if constexpr (GROUPED)
                sum = block[i] + sum * weight_scales[i % WIDTH] +
                      minima[i % WIDTH] * rows.sums[i / WIDTH];
            if (ends_block) add_scaled(sum, rows.scales[i / WIDTH], out + i * LANES);
            block[i] = ends_block ? Vector{} : sum;
        }
        if (ends_block) rows.scales += R;
        if (GROUPED) rows.sums += R;
    }
}

using Multiply = decltype(&multiply<8, false, 1, 1>);

// The loop for a tile of `rows` rows and `panels` panels, 1 or 2; in groups it is always 1.
template <int... R>
Multiply pick_loop(int rows, long panels, long bits, bool by_row, std::integer_sequence<int, R...>) {
    static const Multiply loops[][sizeof...(R)] = {
        {multiply<8, false, R + 1, 1>...}, {multiply<8, false, std::min(R + 1, MAX_ROWS[2]), 2>...},
        {multiply<8, true, R + 1, 1>...}, {multiply<4, true, R + 1, 1>...},
        {multiply<WIDENED, true, R + 1, 1>...}};
    return loops[by_row ? panels - 1 : bits == 8 ? 2 : bits == 4 ? 3 : 4][rows - 1];
}
Multiply loop_for(int rows, long panels, long bits, bool by_row) {
    return pick_loop(rows, panels, bits, by_row, std::make_integer_sequence<int, MAX_ROWS[1]>());
}

// How rows are cut into tiles: as few as registers allow, of equal size; the last is filled up.
// Few rows take one panel at a time, which is read from one end to the other: four side by side, as
// cpu.cpp has them, are four streams of half as many bytes (docs/log, 2026-11-24).
struct Tiling {
    int rows, panels;  // of a tile
    long tiles;
    Tiling(long count, bool by_row, bool on_tiles) {
        panels = on_tiles || (LANES == 16 && count > MAX_ROWS[1] && by_row) ? 2 : 1;
        tiles = ceil_div(count, on_tiles ? 2 * TILE : MAX_ROWS[panels]);
        rows = int(ceil_div(count, tiles));
        if (on_tiles) rows = int(ceil_div(rows, TILE) * TILE);
    }
};

// A row in whole numbers, a block at a time, into its place in a tile of `tile_rows` rows. group:
// inputs whose sum goes to `sums`.
template <class T>
void round_row(const T *x, long inputs, int tile_rows, long group, int32_t *units, float *scales,
               float *sums) {
    for (long first = 0; first < inputs; first += BLOCK, x += BLOCK, scales += tile_rows) {
        const long count = std::min(BLOCK, inputs - first);
        uint32_t top = 0;  // of the numbers without their sign; NaN is the highest, then infinity
        for (long i = 0; i < count; i++) top = std::max(top, as_bits(wide(x[i])) & 0x7fffffffu);
        const float high = as_float(top);
        *scales = top < 0x7f800000u ? high / 32767 : NAN;  // one NaN makes the results NaN
        const float factor = high > 1e-30f && top < 0x7f800000u ? 32767 / high : 0;
        int16_t rounded[BLOCK];
        // Adding 1.5 * 2^23 leaves a number's whole part in the last bits of its sum.
        for (long i = 0; i < count; i++)
            rounded[i] = int16_t(as_bits(wide(x[i]) * factor + 12582912.0f) - 0x4b400000u);
        if (count % 2) rounded[count] = 0;
        for (long start = 0; start < count; start += group, sums += tile_rows) {
            int32_t sum = 0;  // 512 * 32767 at most, which float32 has exactly
            for (long i = start; i < std::min(start + group, count); i++) sum += rounded[i];
            *sums = float(sum);
        }
        for (long i = 0; i < count; i += 2, units += tile_rows) std::memcpy(units, rounded + i, 4);
    }
}

// A panel of `size` bytes as one of bfloat16 with `units` units, at one of two places. For one row
// this takes as long as reading memory, so it is vectorised.
inline const uint32_t *widen(const uint8_t *panel, long size, bool is_4, const Groups &groups,
                             long units, int place) {
    const long room = (units + groups.group) * PANEL;  // the last group may be longer than the inputs
    uint32_t *const made = scratch<uint32_t>(2, 2 * room) + place * room, *out = made;
    std::memset(made + (units - HALF) * PANEL, 0, HALF * 64);  // behind the last input
    const uint8_t *const end = panel + size;
    Vector scales[VECTORS], minima[VECTORS] = {};
    for (Vector &scale : scales) scale = Vector{} + 1;
    if (groups.by_row) panel += groups.head();
    while (panel < end) {
        for (int v = 0; !groups.by_row && v < VECTORS; v++)
            groups.read(panel, v, scales[v], minima[v]);
        panel += groups.by_row ? 0 : groups.head();
        const uint8_t *const behind = std::min(
            end, panel + groups.group / UNITS * (is_4 ? LINE<4> : LINE<8>));
        for (; panel < behind; panel += is_4 ? LINE<4> : LINE<8>) {
            Bits line[VECTORS] = {};
            for (int v = 0; is_4 && v < VECTORS; v++) line[v] = at<Bits>(panel + v * 4 * LANES);
#pragma GCC unroll 4
            for (int k = 0; k < UNITS; k++, out += PANEL)
                for (int v = 0; v < VECTORS; v++) {
                    const Wide unit = is_4 ? take_unit(line[v])
                                           : widen(panel + (k * VECTORS + v) * 2 * LANES);
                    const Bits pair = narrow_pair(
                        __builtin_convertvector(first_of(unit), Vector) * scales[v] + minima[v],
                        __builtin_convertvector(second_of(unit), Vector) * scales[v] + minima[v]);
                    std::memcpy(out + v * LANES, &pair, sizeof pair);
                }
        }
    }
    return made;
}

// A block of a panel of 4 bits, `count` units, with each number in 16 bits, for AVX2. With AVX512
// that was slower than to unpack a panel for each tile of rows (docs/log).
inline const uint8_t *with_wide_numbers(const uint8_t *panel, long count, const Groups &groups) {
    const long head = groups.head();
    uint8_t *const made = scratch<uint8_t>(4, ceil_div(count, groups.group) * head + count * 64);
    uint8_t *out = made;
    for (long first = 0; first < count; first += groups.group) {
        std::memcpy(out, panel, head);
        out += head, panel += head;
        for (long u = first; u < std::min(first + groups.group, count); u += UNITS) {
            __builtin_prefetch(panel + 2048);
            Bits line[VECTORS];
            for (int v = 0; v < VECTORS; v++) line[v] = at<Bits>(panel + v * 4 * LANES);
#pragma GCC unroll 4
            for (int k = 0; k < UNITS; k++)
                for (int v = 0; v < VECTORS; v++, out += sizeof(Wide)) {
                    const Wide unit = take_unit(line[v]);
                    std::memcpy(out, &unit, sizeof unit);
                }
            panel += LINE<4>;
        }
    }
    return made;
}

// sums (tiles, R, 16) of many tiles of rows times a panel of 4 bits: each block of it is widened once
// for all of them, and stays in the first cache.
inline void multiply_in_blocks(Rows rows, long tiles, long tile_size, long scales_size,
                               long sums_size, int tile_rows, const uint8_t *panel, long units,
                               const Groups &groups, float *sums) {
    const Multiply loop = loop_for(tile_rows, 1, WIDENED, false);
    for (long first = 0; first < units; first += BLOCK_UNITS) {
        const long count = std::min(BLOCK_UNITS, units - first);
        const uint8_t *const wide = with_wide_numbers(panel, count, groups);
        const long before = first / groups.group;
        for (long t = 0; t < tiles; t++)
            loop({rows.units + t * tile_size + first * tile_rows,
                  rows.scales + t * scales_size + first / BLOCK_UNITS * tile_rows,
                  rows.sums + t * sums_size + before * tile_rows}, &wide, nullptr, count, groups,
                 sums + t * tile_rows * PANEL, first > 0);
        panel += ceil_div(count, groups.group) * groups.head() + count / UNITS * LINE<4>;
    }
}

constexpr long AHEAD = 4096;  // bytes of a panel that are fetched before they are needed

// out (rows, outputs) = x @ weight.T + bias. group: inputs; 0 for int8 by row. floats: see `Groups`.
// panel_size: bytes.
template <class T, class Out = T>
void product(const T *x, const uint8_t *weight, long bits, long group, long floats, const T *bias,
             Out *out, long rows, long inputs, long panels, long panel_size, long outputs) {
    if (!rows) return;  // as in cpu.cpp
    const bool is_4 = bits == 4, by_row = group == 0;
    const Groups groups{by_row ? BLOCK_UNITS : group / 2, int(floats), by_row};
    const Tiling tiling(rows, by_row, ON_TILES<T>);
    const long units = ON_TILES<T> ? units_in<T>(inputs)
        : by_row ? ceil_div(inputs, 8) * UNITS : ceil_div(inputs, group) * groups.group;
    const long blocks = ceil_div(inputs, BLOCK), sums_of = by_row ? BLOCK : group;
    const long tile_size = (ON_TILES<T> ? room_for<T>(inputs) : units) * tiling.rows;
    const long scales_size = blocks * tiling.rows, sums_size = ceil_div(inputs, sums_of) * tiling.rows;
    int32_t *packed = scratch<int32_t>(0, tiling.tiles * tile_size);
    float *scales = scratch<float>(1, tiling.tiles * scales_size);
    float *sums_of_groups = scratch<float>(3, tiling.tiles * sums_size);
    // By tiles: two threads that wrote to the rows of one tile would share cache lines.
    share_out(tiling.tiles, rows > 32, [&](long t) {  // few rows: quicker than asking
        for (long r = 0; r < tiling.rows; r++) {
            const long row = t * tiling.rows + r;
            int32_t *tile = packed + t * tile_size, *its_units = tile + r;
            if constexpr (ON_TILES<T>) {
                put_on_tile(row < rows ? x + row * inputs : nullptr, inputs, int(r), tiling.rows,
                            reinterpret_cast<uint32_t *>(tile));
                continue;
            }
            if (row < rows)
                round_row(x + row * inputs, inputs, tiling.rows, sums_of, its_units,
                          scales + t * scales_size + r, sums_of_groups + t * sums_size + r);
            // Behind the last input, up to a whole group; and rows that fill the last tile.
            for (long u = row < rows ? ceil_div(inputs, 2) : 0; u < units; u++)
                its_units[u * tiling.rows] = 0;
        }
    });
    const bool is_worth_it = rows * inputs * outputs > 65536;
    share_product(tiling.tiles, tiling.rows, panels, is_worth_it, [&](
            long first_tile, long end_tile, long p, long end) {
        const tiles::Borrowed<ON_TILES<T>> borrowed;
        for (long width = tiling.panels; p < end; p += width) {
            width = std::min(width, end - p);
            const Multiply loop = ON_TILES<T> ? nullptr : loop_for(tiling.rows, width, bits, by_row);
            const long tiles_here = end_tile - first_tile;
            const bool in_blocks = !ON_TILES<T> && is_4 && LANES == 8 && tiles_here > 1;
            const uint8_t *list[2], *next[2];
            const uint32_t *wide[2];  // on matrix tiles, in their place
            for (int i = 0; i < width; i++) {
                list[i] = weight + (p + i) * panel_size;
                next[i] = list[i] + (end_tile - first_tile > 1 ? width * panel_size : AHEAD);
                if constexpr (ON_TILES<T>)
                    wide[i] = widen(list[i], panel_size, is_4, groups, units, i);
            }
            float *const all_sums = scratch<float>(5, tiles_here * tiling.rows * PANEL);
            if (in_blocks)
                multiply_in_blocks({packed + first_tile * tile_size,
                                    scales + first_tile * scales_size,
                                    sums_of_groups + first_tile * sums_size}, tiles_here, tile_size,
                                   scales_size, sums_size, tiling.rows, list[0], units, groups,
                                   all_sums);
            for (long t = first_tile; t < end_tile; t++) {
                alignas(64) float of_one[2 * TILE * 2 * PANEL];
                float *const sums =
                    in_blocks ? all_sums + (t - first_tile) * tiling.rows * PANEL : of_one;
                if constexpr (ON_TILES<T>)
                    loop_on_tiles(tiling.rows, width)(
                        reinterpret_cast<uint32_t *>(packed + t * tile_size), nullptr, wide,
                        nullptr, 1, units, sums, width * PANEL, false);
                else if (!in_blocks)
                    loop({packed + t * tile_size, scales + t * scales_size,
                          sums_of_groups + t * sums_size}, list,
                         t == end_tile - 1 ? next : nullptr, units, groups, sums, false);
                const long count = std::min(width * PANEL, outputs - p * PANEL);
                for (long r = 0; r < tiling.rows && t * tiling.rows + r < rows; r++) {
                    float *sum = sums + r * width * PANEL;
                    for (int i = 0; by_row && i < width * VECTORS; i++) {
                        const uint8_t *const head = list[i / VECTORS] + i % VECTORS * 4 * LANES;
                        const Vector scaled = at<Vector>(sum + i * LANES) * at<Vector>(head);
                        std::memcpy(sum + i * LANES, &scaled, sizeof scaled);
                    }
                    put_row(sum, bias ? bias + p * PANEL : nullptr,
                            out + (t * tiling.rows + r) * outputs + p * PANEL, count);
                }
            }
        }
    });
}

template <class T> constexpr auto wide_product = product<T, float>;  // as in cpu.cpp

template <class T> void multiply_by(const Matrix &matrix, const void *x, void *out, long rows) {
    product<T>(static_cast<const T *>(x), static_cast<const uint8_t *>(matrix.weight), matrix.bits,
               matrix.group, matrix.floats, static_cast<const T *>(matrix.bias),
               static_cast<T *>(out), rows, matrix.inputs, matrix.panels, matrix.panel_size,
               matrix.outputs);
}

}  // namespace

extern "C" const void *const products[] = BOTH(multiply_by);
extern "C" const Function functions[] = {
    FUNCTION(product, T x[rows inputs], i8 weight[panels panel_size], long bits, long group,
             long floats, T? bias[outputs] -> T out[rows outputs]),
    FUNCTION(wide_product, T x[rows inputs], i8 weight[panels panel_size], long bits, long group,
             long floats, T? bias[outputs] -> f32 out[rows outputs]),
    {}};
