// The compiled backend of nanoserve/ops.py for CPUs: the same functions, in one file of plain C++.
//
// One loop multiplies everything: `multiply` below. Its right-hand side lies in *panels*. A panel
// is 16 outputs wide and as long as there are inputs; 16 outputs of one *unit* are neighbours, one
// line of a CPU's cache. A unit is 32 bits along the inputs: one float32, or two bfloat16, which
// AVX512-BF16 multiplies and adds in one instruction. Other CPUs multiply float32 alone, one after
// the other. The left-hand side, the rows, is repacked in each call, so that for each unit a tile's
// rows stand side by side; for those other CPUs in float32, for each input:
//
//     panel (units, 16)                       rows (units, 6)         sums (6, 16 P), in registers
//     unit 0   o0 o1 o2 ... o15   64 bytes    unit 0   r0 r1 .. r5    r0  o0 o1 ... o15 | o16 ...
//     unit 1   o0 o1 o2 ... o15               unit 1   r0 r1 .. r5    r1
//     ...                                     ...                     ..
//
// A weight (outputs, inputs) is packed into panels when it is loaded. **A block of the KV cache is
// a packed weight**: 16 neighbouring slots are a *tile*, and for each KV head
//
//     K of a tile    one panel whose 16 outputs are the tokens:    (head_dim units, 16 tokens)
//     V of a tile    head_dim / 16 panels, inputs are the tokens:  (head_dim / 16, token units, 16)
//
// so scores = q K^T and the sum of weights times V are the linear layer's loop once more. Nothing
// is gathered: the loop takes a list of panels, wherever they lie. Sizes that are no multiple of 16
// or of a unit are filled up with zeros, so any size will do.
//
// Every sum is made by one thread in a fixed order, so a row's numbers don't depend on threads or
// other rows. With a window they do depend on how the prompt was cut into chunks: tiles begin at
// the first key that a chunk sees. float16 comes here as float32.
//
// build.py compiles this file, and checks shapes and dtypes before an address comes here.

#include "matrix_tiles.h"

#include <functional>
#include <numeric>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// ------------------------------------------------------------------ numbers

// NAME: for the start-up line. MAX_ROWS: the rows of a tile by its number of
// panels, P above: all its sums are in registers. 14 rows and 2 panels take 28 of AVX512's 32.
#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS[] = {0, 16, 14, 0, 6};
constexpr const char *NAME = "AVX512";
#elif defined(__AVX__)
constexpr int LANES = 8, MAX_ROWS[] = {0, 6, 2, 0, 1};
constexpr const char *NAME = "AVX2";  // or AVX alone, before 2013
#else
constexpr int LANES = 4, MAX_ROWS[] = {0, 6, 2, 0, 1};
constexpr const char *NAME = "vectors of 128 bits";
#endif
#if defined(__AVX512BF16__)
constexpr const char *NAME_OF_BFLOAT16 = "AVX512-BF16";
#else
constexpr const char *NAME_OF_BFLOAT16 = NAME;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

// exp(x) = 2^n exp(r), with r = x - n log 2 in [-log(2) / 2, log(2) / 2], where a polynomial's
// relative error is 2e-7. Without a branch, so that loops of it become vectors.
inline float fast_exp(float x) {
    float kept = x > 88.0f ? 88.0f : x;
    float shifted = kept * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // rounds
    float r = kept - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1 + r * (1 + r * (0.5f + r * (0.166666667f + r * (0.0416666667f
              + r * (0.00833333333f + r * 0.00138888889f)))));
    float result = as_float(as_bits(p) + (as_bits(shifted) << 23));
    return x < -87.0f ? 0.0f : result;
}
inline float fast_tanh(float x) { return 1 - 2 / (1 + fast_exp(2 * x)); }

template <class Sum, class T> inline Sum sum_of(const T *x, long count, bool squared = false) {
    Sum sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += squared ? wide(x[i]) * wide(x[i]) : wide(x[i]);
    return sum;
}

// How many times the loop goes through a unit, with how many numbers of a row each time.
#if defined(__AVX512BF16__)
template <class T> constexpr long STEPS = 1;
#else
template <class T> constexpr long STEPS = ON_TILES<T> ? 1 : PER_UNIT<T>;
#endif
template <class T> constexpr long PER_STEP = PER_UNIT<T> / STEPS<T>;

// N numbers of a row of `count` as 32 bits, the u-th such; what isn't there is zero.
template <long N, class T> inline uint32_t unit_of(const T *x, long u, long count) {
    if (u * N >= count) return 0;
    if constexpr (N == 1) return as_bits(wide(x[u]));
    else return x[2 * u].bits | (2 * u + 1 < count ? uint32_t(x[2 * u + 1].bits) << 16 : 0);
}

// ------------------------------------------------------------------ the loop

// Into the L2 cache: what is fetched into L1 waits for one of its few buffers (docs/log).
inline void fetch(const void *at) { __builtin_prefetch(at, 0, 2); }

// What the loop must know of numbers: how a panel's line becomes vectors, and how these are
// multiplied by a row's unit and added to a sum.
template <class T> struct Plain {
    using Sum = Vector;
    using Line = Bits;
    using Number = T;
    static constexpr int VECTORS = PANEL / LANES, WORDS = PANEL;  // a panel's unit, as stored
    static constexpr int STEPS = ::STEPS<T>;
    static Line load(const uint32_t *at, int part, int step) {
        Line line;
        std::memcpy(&line, at + part * LANES, sizeof line);
        if constexpr (STEPS == 1) return line;
        else return step == 0 ? line << 16 : line & 0xffff0000u;  // as float32
    }
    static uint32_t unit(const uint32_t *rows, long u, int row, int tile_rows) {
        return rows[u * tile_rows + row];
    }
    static void multiply_add(Sum &sum, Line panel, uint32_t row) {
#if defined(__AVX512BF16__)
        if constexpr (PER_STEP<T> == 2) {
            sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(row)),
                                           (__m512bh)panel);
            return;
        }
#endif
        sum += (Vector)panel * as_float(row);
    }
    // What is in memory is a sum already, which goes on: its bits don't depend on where it stopped.
    static Sum begin(const float *at) {
        Sum sum;
        std::memcpy(&sum, at, sizeof sum);
        return sum;
    }
    static void end(Sum sum, const float *, int, float *at, bool) {
        std::memcpy(at, &sum, sizeof sum);
    }
};

// Panels of int8, read as they are stored, for T that has two numbers a unit: rows are pairs of
// int16 with a scale each, products are summed up as whole numbers, exactly, and scaled at the end.
// A sum of LONGEST_WHOLE products stays below 2^31. Widening each tile first was slower than a
// cache of bfloat16 (docs/log). A row's units are neighbours, as the softmax makes rows.
constexpr long LONGEST_WHOLE = 512;  // numbers of a row
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(MATRIX_TILES)
constexpr bool HAS_WHOLE = true;
struct Whole {
    using Sum = __m512i;
    using Line = __m512i;
    using Number = float;  // not of 16 bits: no matrix tiles
    static constexpr int VECTORS = 1, WORDS = PANEL / 2, STEPS = 1;
    static Line load(const uint32_t *at, int, int) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    }
    static uint32_t unit(const uint32_t *rows, long u, int row, int) {
        uint32_t unit;
        std::memcpy(&unit, rows + row * LONGEST_WHOLE / 2 + u, 4);
        return unit;
    }
    static void multiply_add(Sum &sum, Line panel, uint32_t row) {
        sum = _mm512_dpwssd_epi32(sum, panel, _mm512_set1_epi32(int(row)));
    }
    static Sum begin(const float *) { return Sum{}; }  // whole numbers, which are scaled first
    static void end(Sum sum, const float *scales, int row, float *at, bool add) {
        Vector total = (Vector)_mm512_cvtepi32_ps(sum) * scales[row], was{};
        if (add) std::memcpy(&was, at, sizeof was);
        total += was;
        std::memcpy(at, &total, sizeof total);
    }
};
#else
constexpr bool HAS_WHOLE = false;
using Whole = Plain<BFloat16>;  // in name only
#endif

// sums (R, 16 * P) = rows (units, R) times P panels. The units may lie in several segments: of V,
// each tile is one. panels: where each segment's P panels begin, (segments, P). next: the panels
// that are read next, which are prefetched meanwhile; or null. scales: those of `Whole` rows. out:
// rows of `stride` numbers, with which the sums begin if `add` is set.
template <class Kind, int R, int P>
void multiply(const uint32_t *rows, const float *scales, const uint32_t *const *panels,
              const uint32_t *const *next, long segments, long units, float *out, long stride,
              bool add) {
    constexpr int WIDTH = P * Kind::VECTORS, WORDS = Kind::WORDS;  // WIDTH: vectors of a row's sums
    typename Kind::Sum sums[R * WIDTH];
#pragma GCC unroll 64
    for (int i = 0; i < R * WIDTH; i++)
        sums[i] = add ? Kind::begin(out + i / WIDTH * stride + i % WIDTH * LANES)
                      : typename Kind::Sum{};
    long unit = 0;
    for (long s = 0; s < segments; s++, panels += P, next += next ? P : 0)
        for (long u = 0; u < units; u++)
#pragma GCC unroll 2
            for (int step = 0; step < Kind::STEPS; step++, unit++) {
                typename Kind::Line line[WIDTH];
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) {  // vector by vector: a register each
                    const int p = i / Kind::VECTORS, part = i % Kind::VECTORS;
                    line[i] = Kind::load(panels[p] + u * WORDS, part, step);
                    const bool is_new = part == 0 && step == 0 && u * WORDS % PANEL == 0;
                    if (next && is_new) fetch(next[p] + u * WORDS);
                }
#pragma GCC unroll 64
                for (int i = 0; i < R * WIDTH; i++)
                    Kind::multiply_add(sums[i], line[i % WIDTH],
                                       Kind::unit(rows, unit, i / WIDTH, R));
            }
#pragma GCC unroll 64
    for (int i = 0; i < R * WIDTH; i++)
        Kind::end(sums[i], scales, i / WIDTH, out + i / WIDTH * stride + i % WIDTH * LANES, add);
}

using Multiply = void (*)(const uint32_t *, const float *, const uint32_t *const *,
                          const uint32_t *const *, long, long, float *, long, bool);

// The loop for a tile of `rows` rows and `panels` panels, 4, 2 or 1.
template <class Kind, int... R>
Multiply pick_loop(int rows, long panels, std::integer_sequence<int, R...>) {
    static const Multiply loops[][sizeof...(R)] = {
        {multiply<Kind, R + 1, 1>...}, {multiply<Kind, std::min(R + 1, MAX_ROWS[2]), 2>...},
        {multiply<Kind, std::min(R + 1, MAX_ROWS[4]), 4>...}};
    return loops[panels / 2][rows - 1];
}
template <class Kind> Multiply loop_for(int rows, long panels) {
    if constexpr (ON_TILES<typename Kind::Number>) return loop_on_tiles(rows, panels);
    else return pick_loop<Kind>(rows, panels, std::make_integer_sequence<int, MAX_ROWS[1]>());
}

// `count` numbers as int16, two a unit; returns their scale.
template <class X> float pack_whole(const X *x, long count, uint32_t *units) {
    int16_t *out = reinterpret_cast<int16_t *>(units);
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (long i = 0; i < count; i++) largest = std::max(largest, std::abs(wide(x[i])));
    const float per = largest > 0 ? 32767 / largest : 0;
#pragma omp simd
    for (long i = 0; i < count; i++) out[i] = int16_t(int(std::nearbyint(wide(x[i]) * per)));
    if (count % 2) out[count] = 0;  // the other half of the last unit
    return largest / 32767;
}

// How rows are cut into tiles: as few as registers allow, of equal size; the last is filled up.
struct Tiling {
    int rows, panels;  // sizes of a tile
    long tiles;
    explicit Tiling(long count, bool on_tiles) {
        panels = count <= MAX_ROWS[4] ? 4 : count <= MAX_ROWS[2] || LANES == 16 ? 2 : 1;
        if (LANES == 16 && count > MAX_ROWS[2] && count <= MAX_ROWS[1]) panels = 1;
        if (on_tiles) panels = 2;
        tiles = ceil_div(count, on_tiles ? 2 * TILE : MAX_ROWS[panels]);
        rows = int(ceil_div(count, tiles));
        if (on_tiles) rows = int(ceil_div(rows, TILE) * TILE);
    }
};

// Rows first, first + 1, ... as one tile: units side by side, zeros from row `count` on. Row i is
// row at[i] of x, or row i where `at` is null.
template <class T>
void pack_rows(const T *x, const int64_t *at, long first, long count, int tile_rows, long inputs,
               uint32_t *out) {
    for (int r = 0; r < tile_rows; r++) {
        const bool is_there = first + r < count;
        const T *row = x + (is_there ? at ? at[first + r] : first + r : 0) * inputs;
        if constexpr (ON_TILES<T>) {
            put_on_tile(is_there ? row : nullptr, inputs, r, tile_rows, out);
            continue;
        }
        for (long u = 0; u < STEPS<T> * units_in<T>(inputs); u++)
            out[u * tile_rows + r] = is_there ? unit_of<PER_STEP<T>>(row, u, inputs) : 0;
    }
}

// ------------------------------------------------------------------ products

constexpr long AHEAD = 128;  // lines of panels fetched early; not with few rows, see docs/log
constexpr long INPUTS_AT_ONCE = 256, MANY_TILES = 8;

// A panel's part as float32, a line for each input. place: of the copy.
inline const uint32_t *widened(const uint32_t *panel, long units, long place) {
    constexpr long SIZE = INPUTS_AT_ONCE * PANEL;
    uint32_t *const copy = scratch<uint32_t>(6, 4 * SIZE) + place * SIZE;
    for (long u = 0; u < units; u++, panel += PANEL)
        for (long o = 0; o < PANEL; o++) {
            copy[2 * u * PANEL + o] = panel[o] << 16;
            copy[(2 * u + 1) * PANEL + o] = panel[o] & 0xffff0000u;
        }
    return copy;
}

// sums (tiles, R, 16 P) of many tiles of rows, where bfloat16 is multiplied as float32: each part
// of a panel is widened once for all tiles. Some inputs at a time, so that it and a tile's part
// stay in the first cache. Each sum goes on where it stopped: its bits are those of a row alone.
inline void multiply_in_parts(const uint32_t *rows, long tiles, long tile_size, int tile_rows,
                              const uint32_t *const *panels, long width, long units, float *sums) {
    const Multiply loop = loop_for<Plain<float>>(tile_rows, width);
    constexpr long AT_ONCE = INPUTS_AT_ONCE / 2;
    for (long first = 0; first < units; first += AT_ONCE) {
        const long count = std::min(AT_ONCE, units - first);
        const uint32_t *part[4];
        for (long i = 0; i < width; i++)
            part[i] = widened(panels[i] + first * PANEL, count, i);
        for (long t = 0; t < tiles; t++)
            loop(rows + t * tile_size + 2 * first * tile_rows, nullptr, part, nullptr, 1, 2 * count,
                 sums + t * tile_rows * width * PANEL, width * PANEL, first > 0);
    }
}

// out (rows, outputs) = x @ weight.T + bias.
template <class T, class Out = T>
void product(const T *x, const uint32_t *weight, const T *bias, Out *out,
             long rows, long inputs, long outputs) {
    if (!rows) return;  // a step that samples nothing: the LM head need not be read
    const Tiling tiling(rows, ON_TILES<T>);
    const long units = units_in<T>(inputs), panels = ceil_div(outputs, PANEL);
    const long tile_size = STEPS<T> * room_for<T>(inputs) * tiling.rows;
    uint32_t *packed = scratch<uint32_t>(0, tiling.tiles * tile_size);
    share_out(tiling.tiles, rows > 32, [&](long t) {
        pack_rows<T>(x, nullptr, t * tiling.rows, rows, tiling.rows, inputs, packed + t * tile_size);
    });
    const bool is_worth_it = rows * inputs * outputs > 65536;
    share_product(tiling.tiles, tiling.rows, panels, is_worth_it, [&](
            long first_tile, long end_tile, long p, long end) {
        const tiles::Borrowed<ON_TILES<T>> borrowed;
        for (long width = tiling.panels; p < end; p += width) {
            while (p + width > end) width /= 2;
            const Multiply loop = loop_for<Plain<T>>(tiling.rows, width);
            const uint32_t *list[4], *next[4];
            const bool whole = end_tile - first_tile > 1 || ON_TILES<T>;
            const long lines = whole ? width * units : AHEAD / width;
            for (int i = 0; i < width; i++) {
                list[i] = weight + (p + i) * units * PANEL;
                next[i] = list[i] + lines * PANEL;
            }
            const bool in_parts = STEPS<T> == 2 && end_tile - first_tile > MANY_TILES;
            const long size = tiling.rows * width * PANEL;  // 32 rows and 2 panels on matrix tiles
            float *sums = scratch<float>(7, (in_parts ? end_tile - first_tile : 1) * size);
            if (in_parts)
                multiply_in_parts(packed + first_tile * tile_size, end_tile - first_tile, tile_size,
                                  tiling.rows, list, width, units, sums);
            for (long t = first_tile; t < end_tile; t++) {
                // Each of the last tiles fetches one of the next panels, so that memory does not
                // rest meanwhile: the last tile panel 0. An only tile fetches all of them.
                const long k = end_tile - 1 - t;
                const uint32_t *ahead[4];
                for (int i = 0; i < width; i++)
                    ahead[i] = end_tile - first_tile == 1 || i == k ? next[i] : list[i];
                const bool fetches = tiling.panels < 4 && k < width;
                if (!in_parts)
                    loop(packed + t * tile_size, nullptr, list, fetches ? ahead : nullptr, 1, units,
                         sums, width * PANEL, false);
                const float *of_tile = sums + (in_parts ? (t - first_tile) * size : 0);
                const long count = std::min(width * PANEL, outputs - p * PANEL);
                for (long r = 0; r < tiling.rows && t * tiling.rows + r < rows; r++) {
                    put_row(of_tile + r * width * PANEL, bias ? bias + p * PANEL : nullptr,
                            out + (t * tiling.rows + r) * outputs + p * PANEL, count);
                }
            }
        }
    });
}

template <class T> constexpr auto wide_product = product<T, float>;  // sums are not rounded

template <class T> void multiply_by(const Matrix &matrix, const void *x, void *out, long rows) {
    product<T>(static_cast<const T *>(x), static_cast<const uint32_t *>(matrix.weight),
               static_cast<const T *>(matrix.bias), static_cast<T *>(out), rows, matrix.inputs,
               matrix.outputs);
}

// weight (outputs, inputs) into panels, for each of `count` matrices.
template <class T>
void prepack(const T *weight, uint32_t *out, long count, long outputs, long inputs, long panels,
          long units) {
    share_out(count * panels, true, [&](long p) {
        for (long o = 0; o < PANEL; o++) {
            const long output = p % panels * PANEL + o;
            const T *row = weight + (p / panels * outputs + output) * inputs;
            for (long u = 0; u < units; u++)
                out[(p * units + u) * PANEL + o] =
                    output < outputs ? unit_of<PER_UNIT<T>>(row, u, inputs) : 0;
        }
    });
}

// ------------------------------------------------- norms and gated MLPs

// out = total / rms(total) * weight, by rows. total = x + residual; without a residual x is it.
template <class T>
void add_rms_norm(const T *x, const T *residual, const float *weight, float eps, T *out, T *total,
                  long rows, long size) {
    share_out(rows, rows * size > 32768, [&](long row) {
        const T *values = x + row * size;
        T *rounded = total + row * size, *result = out + row * size;
        for (long i = 0; residual && i < size; i++)
            narrow(wide(values[i]) + wide(residual[row * size + i]), rounded[i]);
        if (residual) values = rounded;
        const float factor = 1 / std::sqrt(sum_of<float>(values, size, true) / float(size) + eps);
        for (long i = 0; i < size; i++) narrow(wide(values[i]) * factor * weight[i], result[i]);
    });
}

// act(gate) * up. Both activations are x * sigmoid(z): tanh(y) = 2 sigmoid(2 y) - 1.
template <class T>
void act_and_mul(const T *gate_up, long is_gelu, T *out, long rows, long size) {
    const float linear = is_gelu ? 1.5957691216f : 1, cubic = is_gelu ? 0.0713548163f : 0;
    share_out(rows, rows * size > 16384, [&](long row) {
        const T *gate = gate_up + 2 * row * size, *up = gate + size;
        for (long i = 0; i < size; i++) {
            const float x = wide(gate[i]), z = x * (linear + cubic * x * x);
            narrow(x / (1 + fast_exp(-z)) * wide(up[i]), out[row * size + i]);
        }
    });
}

// Rows at[0], at[1], ... of x.
template <class T> void take_rows(const T *x, const int64_t *at, long count, long size, T *out) {
    for (long i = 0; i < count; i++) std::copy_n(x + at[i] * size, size, out + i * size);
}

// The weighted answers of each token's experts. Tokens are taken expert by expert, and each expert
// that is hit is two products of the tokens that chose it. gate_up, down: (count,)
template <class T>
void mixture(const T *hidden, const float *weights, const int64_t *ids, const Matrix *gate_up,
             const Matrix *down, long first_expert, long is_gelu, T *out, long tokens, long size,
             long per_token, long count, long inner) {
    float *sums = scratch<float>(1, tokens * size);
    T *both = scratch<T>(2, tokens * 2 * inner), *gated = scratch<T>(3, tokens * inner);
    T *answers = scratch<T>(4, tokens * size), *chosen = scratch<T>(5, tokens * size);
    std::fill(sums, sums + tokens * size, 0.0f);
    for (long expert = 0; expert < count; expert++) {
        std::vector<int64_t> chose, pairs;
        for (long pair = 0; pair < tokens * per_token; pair++)
            if (ids[pair] == first_expert + expert) {
                chose.push_back(pair / per_token);
                pairs.push_back(pair);
            }
        const long rows = long(chose.size());
        if (!rows) continue;
        take_rows(hidden, chose.data(), rows, size, chosen);
        gate_up[expert].multiply(gate_up[expert], chosen, both, rows);
        act_and_mul(both, is_gelu, gated, rows, inner);
        down[expert].multiply(down[expert], gated, answers, rows);
        for (long row = 0; row < rows; row++)
            for (long i = 0; i < size; i++)
                sums[chose[row] * size + i] += weights[pairs[row]] * wide(answers[row * size + i]);
    }
    for (long i = 0; i < tokens * size; i++) narrow(sums[i], out[i]);
}

// `mixture` for experts whose panels are contiguous.
template <class T>
void experts(const T *hidden, const float *weights, const int64_t *ids, const uint32_t *gate_up,
             const uint32_t *down, long first_expert, long is_gelu, T *out, long tokens, long size,
             long per_token, long count, long inner) {
    const long gate_up_size = ceil_div(2 * inner, PANEL) * PANEL * units_in<T>(size);
    const long down_size = ceil_div(size, PANEL) * PANEL * units_in<T>(inner);
    std::vector<Matrix> both(count), second(count);
    for (long i = 0; i < count; i++) {
        both[i] = {multiply_by<T>, gate_up + i * gate_up_size, nullptr, size, 2 * inner};
        second[i] = {multiply_by<T>, down + i * down_size, nullptr, inner, size};
    }
    mixture(hidden, weights, ids, both.data(), second.data(), first_expert, is_gelu, out, tokens,
            size, per_token, count, inner);
}

// ------------------------------------------------------------- the KV cache

// Where a layer's cache stores a tile's KV head. padded: head_dim, filled up to whole panels.
//
// A *small* cache has int8 instead of T, in the same order, and after a tile's numbers the scales of
// its 16 tokens. T can represent every int8, so a tile is widened to panels of T without rounding;
// K's scales then multiply scores, and V's the weights of the softmax.
// With AVX512-VNNI and bfloat16 they are not widened: see `Whole`.
template <class T> struct Cache {
    uint32_t *k, *v;
    long kv_heads, stored, block_size;
    bool is_int8 = stored % PANEL != 0;  // the shape has a scale's 4 bytes behind a token's head
    long padded = is_int8 ? stored - 4 : stored;
    static constexpr long N = PER_UNIT<T>, V_UNITS = PANEL / N;  // a tile's tokens
    long size() const { return padded * V_UNITS; }  // units of a tile's KV head, of K as of V
    long words() const { return is_int8 ? padded * PANEL / 4 + PANEL : size(); }  // as stored
    uint32_t *keys(long tile, long head) const { return k + (tile * kv_heads + head) * words(); }
    uint32_t *values(long tile, long head) const { return v + (tile * kv_heads + head) * words(); }
    const float *scales(const uint32_t *tile) const {
        return reinterpret_cast<const float *>(tile + padded * PANEL / 4);
    }
    // Which of a tile's numbers is number i of the token in a lane, in K and in V.
    static long key_at(long i, long lane) { return (i / N * PANEL + lane) * N + i % N; }
    static long value_at(long i, long lane) {
        return ((i / PANEL * V_UNITS + lane / N) * PANEL + i % PANEL) * N + lane % N;
    }

    // A token's head goes to its places; in 8 bits by the rule of `small` in ops.py.
    template <class At> void store(const T *x, long size, long lane, uint32_t *tile, At at) const {
        char *numbers = reinterpret_cast<char *>(tile);
        if (!is_int8) {
            for (long i = 0; i < size; i++)
                std::memcpy(numbers + at(i, lane) * sizeof(T), x + i, sizeof(T));
            return;
        }
        uint32_t largest = 0;  // without its sign; NaN is the highest, then infinity
        for (long i = 0; i < size; i++)
            largest = std::max(largest, as_bits(wide(x[i])) & 0x7fffffffu);
        const float scale = as_float(largest) / 127;  // NaN makes all of the head NaN
        std::memcpy(tile + padded * PANEL / 4 + lane, &scale, 4);
        const float step = std::isfinite(scale) ? std::max(scale, 1.17549435e-38f) : INFINITY;
        for (long i = 0; i < size; i++) {
            const float rounded = std::nearbyint(wide(x[i]) / step);  // a head of zeros has 0
            numbers[at(i, lane)] = char(rounded == rounded ? int8_t(rounded) : 0);
        }
    }

    // A small tile as panels of T.
    void widen(const uint32_t *tile, uint32_t *out) const {
        const int8_t *numbers = reinterpret_cast<const int8_t *>(tile);
        T *wide = reinterpret_cast<T *>(out);
        const long count = padded * PANEL;  // a store could change `padded`: no vectors, then
        for (long i = 0; i < count; i++) ::widen(numbers[i], wide[i]);
    }
};

// A head's norm and RoPE: the pair (i, i + half) is turned. In float32, and rounded once.
template <class T>
void turn(const T *x, const float *weight, float eps, const float *cos, const float *sin,
          long head_dim, T *out) {
    const float squares = weight ? sum_of<float>(x, head_dim, true) / float(head_dim) + eps : 1;
    const float factor = 1 / std::sqrt(squares);
    const long half = head_dim / 2;
    const auto at = [&](long i) { return wide(x[i]) * factor * (weight ? weight[i] : 1); };
    for (long i = 0; i < half; i++) narrow(at(i) * cos[i] - at(i + half) * sin[i], out[i]);
    for (long i = half; i < head_dim; i++)
        narrow(at(i) * cos[i] + at(i - half) * sin[i], out[i]);
}

template <class T>
void norm_rope_store(const T *qkv, const float *q_weight, const float *k_weight, float eps,
                     const float *cos, const float *sin, uint32_t *k, uint32_t *v,
                     const int32_t *slots, T *out, long tokens, long head_dim, long block_size,
                     long kv_heads, long stored, long heads) {
    const Cache<T> cache{k, v, kv_heads, stored, block_size};
    share_out(tokens, tokens > 1, [&](long token) {
        const T *x = qkv + token * (heads + 2 * kv_heads) * head_dim;
        const float *c = cos + token * head_dim, *s = sin + token * head_dim;
        T *turned = scratch<T>(5, head_dim);
        for (long head = 0; head < heads; head++, x += head_dim)
            turn(x, q_weight, eps, c, s, head_dim, out + (token * heads + head) * head_dim);
        if (slots[token] < 0) return;  // padding of a batch
        const long tile = slots[token] / PANEL, lane = slots[token] % PANEL;
        for (long head = 0; head < kv_heads; head++, x += head_dim) {
            turn(x, k_weight, eps, c, s, head_dim, turned);
            cache.store(turned, head_dim, lane, cache.keys(tile, head), cache.key_at);
            cache.store(x + kv_heads * head_dim, head_dim, lane, cache.values(tile, head),
                        cache.value_at);
        }
    });
}

// ---------------------------------------------------------------- attention

constexpr long TILES_AT_ONCE = 8;  // their scores are computed before the softmax moves on

// A part of a tile that belongs to a row: `count` lanes from `lane` on, the first at `position`;
// and the tile's panels, for one KV head.
struct Piece { const uint32_t *keys, *values; long lane, count, position; };

// Causal attention of a row's queries first .. first + count - 1, with one KV head and the `group`
// query heads that share it: softmax(q k^T * scale) v, a few tiles of keys at a time. The softmax
// runs (Dao et al. 2022): for each query and head it keeps the highest score so far, the sum of
// weights and the weighted sum of V, and shrinks both sums when a higher score comes.
template <class T> struct Attention {
    static constexpr long WIDTH = TILES_AT_ONCE * PANEL, V_UNITS = Cache<T>::V_UNITS;
    const T *q;
    const int32_t *tables, *seq_lens, *starts;  // starts: cu_seqlens_q
    long table_stride, heads, head_dim, window;
    float scale, softcap;
    const float *sinks;  // one a head, or null
    const int32_t *last;  // the last key that each query sees, or null: its own
    Cache<T> cache;
    T *out;
    // Whether a small cache is multiplied as it is stored.
    bool whole = HAS_WHOLE && PER_UNIT<T> == 2 && cache.is_int8 && head_dim <= LONGEST_WHOLE;

    void run(long row, long kv_head, long first, long count) const {
        const long group = heads / cache.kv_heads, rows = count * group;
        const long position = seq_lens[row] - (starts[row + 1] - starts[row]) + first;
        const auto last_of = [&](long m) {
            return last ? last[starts[row] + first + m / group] : position + m / group;
        };
        long end = position + count;
        for (long m = 0; last && m < rows; m += group) end = std::max(end, last_of(m) + 1L);
        const tiles::Borrowed<ON_TILES<T>> borrowed;
        const Tiling tiling(rows, ON_TILES<T>);
        const long padded_rows = tiling.tiles * tiling.rows;
        const long q_units = whole ? LONGEST_WHOLE / 2 : STEPS<T> * room_for<T>(head_dim);
        const long weight_units = whole ? LONGEST_WHOLE / 2 : STEPS<T> * TILES_AT_ONCE * V_UNITS;
        uint32_t *packed = scratch<uint32_t>(0, padded_rows * q_units);
        uint32_t *weights = scratch<uint32_t>(3, padded_rows * weight_units);
        float *sums = scratch<float>(1, padded_rows * cache.padded);
        float *scores = scratch<float>(2, padded_rows * WIDTH);
        float *highest = scratch<float>(4, 4 * padded_rows), *total = highest + padded_rows;
        float *q_scales = total + padded_rows, *weight_scales = q_scales + padded_rows;
        // Row m of the products is query m / group with head m % group of the group.
        int64_t *at = scratch<int64_t>(5, rows);
        for (long m = 0; m < rows; m++)
            at[m] = (starts[row] + first + m / group) * heads + kv_head * group + m % group;
        for (long t = 0; !whole && t < tiling.tiles; t++)
            pack_rows(q, at, t * tiling.rows, rows, tiling.rows, head_dim,
                      packed + t * tiling.rows * q_units);
        for (long m = 0; whole && m < rows; m++)
            q_scales[m] = pack_whole(q + at[m] * head_dim, head_dim, packed + m * q_units);
        std::fill(sums, sums + padded_rows * cache.padded, 0.0f);
        std::fill(highest, total, -1e30f);  // not -inf: inf - inf is NaN
        std::fill(total, total + padded_rows, 0.0f);
        for (long m = 0; sinks && m < rows; m++) {  // as if the sink's key had been the first
            highest[m] = std::max(sinks[kv_head * group + m % group], -1e30f);
            total[m] = 1;
        }

        Piece pieces[TILES_AT_ONCE], next[TILES_AT_ONCE];
        long n = cut(row, kv_head, window ? std::max(0L, position - window + 1) : 0, end, next);
        while (n) {
            std::copy(next, next + n, pieces);
            const long num_next = cut(row, kv_head, pieces[n - 1].position + pieces[n - 1].count,
                                      end, next);
            score(pieces, n, tiling, packed, q_units, q_scales, scores);
            for (long m = 0; m < rows; m++) {
                soften(pieces, n, position + m / group, last_of(m), scores + m * WIDTH,
                       sums + m * cache.padded, highest[m], total[m]);
                put_weights(scores + m * WIDTH, n, m, tiling.rows, weight_units, weights,
                            weight_scales);
            }
            sum_values(pieces, n, num_next == n ? next : nullptr, tiling, weights, weight_units,
                       weight_scales, sums);
            n = num_next;
        }
        for (long m = 0; m < rows; m++) {
            const float factor = 1 / total[m];
            for (long i = 0; i < head_dim; i++)
                narrow(sums[m * cache.padded + i] * factor, out[at[m] * head_dim + i]);
        }
    }

    // The pieces in which the row's keys key .. end - 1 lie, but no more than are taken at once.
    long cut(long row, long kv_head, long key, long end, Piece *pieces) const {
        long n = 0;
        for (; n < TILES_AT_ONCE && key < end; n++) {
            const long block = tables[row * table_stride + key / cache.block_size];
            const long offset = key % cache.block_size;
            const long slot = block * cache.block_size + offset, lane = slot % PANEL;
            const long there = std::min({PANEL - lane, cache.block_size - offset, end - key});
            pieces[n] = {cache.keys(slot / PANEL, kv_head), cache.values(slot / PANEL, kv_head),
                         lane, there, key};
            key += there;
        }
        return n;
    }

    Multiply loop_of(const Tiling &tiling, long width) const {
        return whole ? loop_for<Whole>(tiling.rows, width)
                     : loop_for<Plain<T>>(tiling.rows, width);
    }

    // scores (rows, 16 n) = q K^T. Meanwhile V is fetched, which is read next.
    void score(const Piece *pieces, long n, const Tiling &tiling, const uint32_t *packed,
               long q_units, const float *q_scales, float *scores) const {
        // A head's padding is never written. Matrix tiles read it: it is zero.
        const long units = ON_TILES<T> ? units_in<T>(head_dim) : ceil_div(head_dim, PER_UNIT<T>);
        for (long p = 0, width = tiling.panels; p < n; p += width) {
            while (p + width > n) width /= 2;
            const uint32_t *keys[4], *next[4];
            for (long i = 0; i < width; i++) {
                keys[i] = readable(pieces[p + i].keys, i);
                next[i] = pieces[p + i].values;
                if (cache.is_int8) fetch(cache.scales(next[i]));
            }
            for (long t = 0; t < tiling.tiles; t++)
                loop_of(tiling, width)(
                    packed + t * tiling.rows * q_units, q_scales + t * tiling.rows, keys,
                    t ? nullptr : next, 1, units,
                    scores + t * tiling.rows * WIDTH + p * PANEL, WIDTH, false);
        }
    }

    // One row's scores become weights. position, seen: of the row's query, and the last in sight.
    void soften(const Piece *pieces, long n, long position, long seen, float *scores, float *sums,
                float &highest, float &total) const {
        const long keys = n * PANEL;
        for (long p = 0; p < n; p++) {
            float *s = scores + p * PANEL;
            const float *of_keys = cache.scales(pieces[p].keys);
#pragma omp simd
            for (int i = 0; i < PANEL; i++) s[i] *= scale;
            if (cache.is_int8)
#pragma omp simd
                for (int i = 0; i < PANEL; i++) s[i] *= of_keys[i];
            if (softcap > 0)
#pragma omp simd
                for (int i = 0; i < PANEL; i++) s[i] = softcap * fast_tanh(s[i] / softcap);
            // Of a piece the lanes [low, high) are seen. Example: lane 0 at position 32, query 35,
            // window 3: lanes 1, 2, 3 are.
            const long base = pieces[p].position - pieces[p].lane;
            const long from = window ? position - window + 1 - base : 0, to = seen + 1 - base;
            const int low = int(std::max(pieces[p].lane, from));
            const int high = int(std::min(pieces[p].lane + pieces[p].count, to));
            if (low > 0 || high < PANEL)
#pragma omp simd
                for (int i = 0; i < PANEL; i++) s[i] = i >= low && i < high ? s[i] : -INFINITY;
        }
        float best[PANEL], sum[PANEL] = {};  // lane by lane, which the compiler makes vectors of
        std::fill(best, best + PANEL, highest);
        for (long p = 0; p < keys; p += PANEL)
#pragma omp simd
            for (int i = 0; i < PANEL; i++) best[i] = std::max(best[i], scores[p + i]);
        float top = best[0];
#pragma omp simd reduction(max : top)
        for (int i = 0; i < PANEL; i++) top = std::max(top, best[i]);
        const float shrink = fast_exp(highest - top);
        for (long p = 0; p < keys; p += PANEL)
#pragma omp simd
            for (int i = 0; i < PANEL; i++) {
                scores[p + i] = fast_exp(scores[p + i] - top);
                sum[i] += scores[p + i];
            }
        total = total * shrink + sum_of<float>(sum, PANEL);
        if (top != highest)
            for (long i = 0; i < cache.padded; i++) sums[i] *= shrink;
        highest = top;
        for (long p = 0; cache.is_int8 && p < n; p++) {  // lanes of others may have any scale
            const float *of_values = cache.scales(pieces[p].values);
            float *s = scores + p * PANEL;
#pragma omp simd
            for (int i = 0; i < PANEL; i++) {
                const float scaled = s[i] * of_values[i];
                s[i] = s[i] > 0 ? scaled : 0;
            }
        }
    }

    // The weights of row m, as units of its tile.
    void put_weights(const float *scores, long n, long m, int tile_rows, long weight_units,
                     uint32_t *weights, float *weight_scales) const {
        if (whole) {
            weight_scales[m] = pack_whole(scores, n * PANEL, weights + m * weight_units);
            return;
        }
        T rounded[WIDTH];
        for (long i = 0; i < n * PANEL; i++) narrow(scores[i], rounded[i]);
        uint32_t *tile = weights + m / tile_rows * tile_rows * weight_units;
        if constexpr (ON_TILES<T>)
            return put_on_tile(rounded, n * PANEL, int(m % tile_rows), tile_rows, tile);
        uint32_t *row = tile + m % tile_rows;
        for (long u = 0; u < n * PANEL / PER_STEP<T>; u++)
            row[u * tile_rows] = unit_of<PER_STEP<T>>(rounded, u, n * PANEL);
    }

    // sums (rows, head_dim) += weights V. Meanwhile the next keys are fetched.
    void sum_values(const Piece *pieces, long n, const Piece *next_pieces, const Tiling &tiling,
                    const uint32_t *weights, long weight_units, const float *weight_scales,
                    float *sums) const {
        const uint32_t *values[TILES_AT_ONCE];
        for (long p = 0; p < n; p++) {
            values[p] = pieces[p].count < PANEL && !cache.is_int8
                ? living(pieces[p], p) : readable(pieces[p].values, p);
            if (next_pieces && cache.is_int8) fetch(cache.scales(next_pieces[p].keys));
        }
        const long step = V_UNITS * (whole ? Whole::WORDS : PANEL), groups = cache.padded / PANEL;
        for (long g = 0, width = tiling.panels; g < groups; g += width) {
            while (g + width > groups) width /= 2;
            const uint32_t *list[TILES_AT_ONCE * 4], *next[TILES_AT_ONCE * 4];
            for (long p = 0, i = 0; p < n; p++)
                for (long panel = g; panel < g + width; panel++, i++) {
                    list[i] = values[p] + panel * step;
                    if (next_pieces) next[i] = next_pieces[p].keys + panel * step;
                }
            for (long t = 0; t < tiling.tiles; t++)
                loop_of(tiling, width)(
                    weights + t * tiling.rows * weight_units, weight_scales + t * tiling.rows,
                    list, t || !next_pieces ? nullptr : next, n, V_UNITS,
                    sums + t * tiling.rows * cache.padded + g * PANEL, cache.padded, true);
        }
    }

    // A tile as the loop reads it: one of int8 may have to be widened first, into copy `place`.
    const uint32_t *readable(const uint32_t *tile, long place) const {
        if (!cache.is_int8 || whole) return tile;
        uint32_t *copy = scratch<uint32_t>(6, TILES_AT_ONCE * cache.size()) + place * cache.size();
        cache.widen(tile, copy);
        return copy;
    }

    // V of a piece that has not all lanes of its tile. The others hold other requests' numbers,
    // maybe infinities or NaN, and 0 * inf is NaN: returns a copy with zeros in them. (Those of a
    // small tile are finite, and `soften` sees to their scales.)
    const uint32_t *living(const Piece &piece, long place) const {
        uint32_t *copy = scratch<uint32_t>(6, TILES_AT_ONCE * cache.size()) + place * cache.size();
        for (long line = 0; line < cache.size() / PANEL; line++) {
            uint32_t mask = 0;
            for (long i = 0; i < PER_UNIT<T>; i++) {
                const long lane = line % V_UNITS * PER_UNIT<T> + i - piece.lane;
                if (lane >= 0 && lane < piece.count)
                    mask |= PER_UNIT<T> == 1 ? ~0u : 0xffffu << 16 * i;
            }
            for (long i = line * PANEL; i < (line + 1) * PANEL; i++)
                copy[i] = piece.values[i] & mask;
        }
        return copy;
    }
};

constexpr long ROWS_AT_ONCE = 64;  // a product's: queries times heads of a group

template <class T>
void paged_attention(const T *q, uint32_t *k, uint32_t *v, const int32_t *tables,
                     const int32_t *seq_lens, const int32_t *starts, float scale, long window,
                     float softcap, const float *sinks, const int32_t *last, T *out, long tokens,
                     long heads, long head_dim, long block_size, long kv_heads, long stored,
                     long num_rows, long table_stride) {
    const Attention<T> attention{q, tables, seq_lens, starts, table_stride, heads, head_dim, window,
                                 scale, softcap, sinks, last,
                                 {k, v, kv_heads, stored, block_size}, out};
    struct Work { long row, first, count; };
    std::vector<Work> work;  // for each KV head
    const long at_once = std::max(1L, ROWS_AT_ONCE / (heads / kv_heads));
    for (long row = 0; row < num_rows; row++)
        for (long first = 0, end = starts[row + 1] - starts[row]; first < end; first += at_once)
            work.push_back({row, first, std::min(at_once, end - first)});
    // Tokens behind the last row's are padding.
    std::fill(out + starts[num_rows] * heads * head_dim, out + tokens * heads * head_dim, T{});
    const long count = long(work.size());
    share_out(count * kv_heads, true, [&](long i) {
        const Work &one = work[count - 1 - i % count];  // the last queries see the most keys
        attention.run(one.row, i / count, one.first, one.count);
    });
}

// ------------------------------------------------------------ a layer in one call

// A `DecoderLayer` of model.py. Norms that a family lacks are null. A mixture of experts has no
// matrices here: then what it reads is the result.
struct Layer {
    const float *input_norm, *q_norm, *k_norm, *attended_norm, *mlp_norm, *answer_norm;
    uint32_t *k, *v;
    Matrix qkv, o, gate_up, down;
    long size, heads, kv_heads, head_dim, stored, block_size, window, is_gelu;
    float eps, scale, softcap;
};

// A step's tokens: what all layers read.
struct Tokens {
    const float *cos, *sin;
    const int32_t *slots, *tables, *seq_lens, *starts;
    long count, rows, width;
};

// The functions above, in the order in which model.py calls them, so the bits are the same. What a
// small step spends between them in Python took a third of its time (docs/log, 2026-11-29).
// wanted: the `rows` tokens that go on behind attention; null for all of them, or if there are none.
// stream: out, the residual stream.
template <class T>
void decoder_layer(const Layer &layer, const Tokens &tokens, const T *hidden, const T *residual,
                   const int64_t *wanted, long rows, T *out, T *stream) {
    const long count = tokens.count, size = layer.size;
    const long q_size = layer.heads * layer.head_dim, inner = layer.down.inputs;
    T *normed = scratch<T>(8, count * size), *sum = scratch<T>(9, count * size);
    T *qkv = scratch<T>(10, count * std::max(layer.qkv.outputs, size));
    T *q = scratch<T>(11, count * q_size);
    T *attended = scratch<T>(12, count * q_size), *answer = scratch<T>(13, count * size);
    add_rms_norm(hidden, residual, layer.input_norm, layer.eps, normed, sum, count, size);
    const T *so_far = residual ? sum : hidden;
    layer.qkv.multiply(layer.qkv, normed, qkv, count);
    norm_rope_store(qkv, layer.q_norm, layer.k_norm, layer.eps, tokens.cos, tokens.sin, layer.k,
                    layer.v, tokens.slots, q, count, layer.head_dim, layer.block_size,
                    layer.kv_heads, layer.stored, layer.heads);
    paged_attention(q, layer.k, layer.v, tokens.tables, tokens.seq_lens, tokens.starts, layer.scale,
                    layer.window, layer.softcap, nullptr, nullptr, attended, count, layer.heads,
                    layer.head_dim, layer.block_size, layer.kv_heads, layer.stored, tokens.rows,
                    tokens.width);
    if (wanted) {
        take_rows(attended, wanted, rows, q_size, q);
        take_rows(so_far, wanted, rows, size, normed);
        attended = q, so_far = normed;
    }
    layer.o.multiply(layer.o, attended, answer, rows);
    T *normed_answer = qkv;  // qkv is not read any more
    const T *joins = answer;
    const float *mlp_norm = layer.attended_norm;
    if (layer.mlp_norm) {
        add_rms_norm<T>(answer, nullptr, layer.attended_norm, layer.eps, normed_answer, sum, rows,
                        size);
        joins = normed_answer, mlp_norm = layer.mlp_norm;
    }
    T *read = layer.gate_up.multiply ? scratch<T>(14, rows * size) : out;
    add_rms_norm(joins, so_far, mlp_norm, layer.eps, read, stream, rows, size);
    if (!layer.gate_up.multiply) return;
    T *both = scratch<T>(15, rows * 3 * inner), *gated = both + rows * 2 * inner;
    layer.gate_up.multiply(layer.gate_up, read, both, rows);
    act_and_mul(both, layer.is_gelu, gated, rows, inner);
    T *last = layer.answer_norm ? answer : out;
    layer.down.multiply(layer.down, gated, last, rows);
    if (layer.answer_norm)
        add_rms_norm<T>(last, nullptr, layer.answer_norm, layer.eps, out, sum, rows, size);
}

// Some layers in sequence. wanted: rows of the last one.
template <class T>
void decoder_layers(const Layer *const *layers, const Tokens *const *tokens, long num_layers,
                    const T *hidden, const T *residual, const int64_t *wanted, long rows, T *out,
                    T *stream) {
    for (long i = 0; i < num_layers; i++) {
        const long count = tokens[i]->count, size = layers[i]->size;
        const int turn = int(i % 2);  // what a layer writes is not what it reads
        const bool is_last = i == num_layers - 1;
        T *next = is_last ? out : scratch<T>(16 + turn, count * size);
        T *next_stream = is_last ? stream : scratch<T>(18 + turn, count * size);
        decoder_layer(*layers[i], *tokens[i], hidden, residual, is_last ? wanted : nullptr,
                      is_last ? rows : count, next, next_stream);
        hidden = next, residual = next_stream;
    }
}

// ----------------------------------------------------------------- sampling

// The first of the highest; -1 for a row whose highest is NaN or infinite.
template <class T> void argmax(const T *logits, int64_t *out, long rows, long size) {
    share_out(rows, rows * size > 32768, [&](long row) {
        const T *x = logits + row * size;
        float top = -INFINITY;
        int is_nan = 0;
#pragma omp simd reduction(max : top) reduction(| : is_nan)
        for (long i = 0; i < size; i++) {
            const float one = wide(x[i]);
            top = std::max(top, one);
            is_nan |= one != one;
        }
        out[row] = is_nan || std::isinf(top) ? -1
            : std::find_if(x, x + size - 1, [&](T one) { return wide(one) == top; }) - x;
    });
}

// Where to cut a row, so that all numbers from `floor` on weigh at least `target` together; `above`
// is what those beyond it weigh. Numbers below `low` don't count, and if the others don't suffice
// the floor is `low`. Numbers are sorted into bins by their first bits; only one bin is sorted.
struct Floor { float floor; double above; };

template <class Weight>
Floor cut(const float *x, long size, float low, double target, const Weight &weight) {
    const auto bin_of = [](float number) {  // a negative one has all bits but the sign turned
        const uint32_t bits = as_bits(number + 0.0f);
        return (bits >> 31 ? ~bits : bits | 0x80000000) >> 20;
    };
    std::vector<double> bins(4096);
    for (long i = 0; i < size; i++)
        if (x[i] >= low) bins[bin_of(x[i])] += weight(i);
    double above = 0;
    uint32_t bin = 4095;
    while (bin && above + bins[bin] < target) above += bins[bin--];
    std::vector<std::pair<float, double>> found;
    for (long i = 0; i < size; i++)
        if (x[i] >= low && bin_of(x[i]) == bin) found.push_back({x[i], weight(i)});
    std::sort(found.begin(), found.end(), std::greater<>());
    for (size_t i = 0; i < found.size();) {
        const float floor = found[i].first;
        double equal = 0;
        for (; i < found.size() && found[i].first == floor; i++) equal += found[i].second;
        if (above + equal >= target) return {floor, above};
        above += equal;
    }
    return {low, above};
}

template <class T>
void thresholds(const T *logits, const float *temperature, const int32_t *top_k, const float *top_p,
            const float *min_p, float *out, int32_t *last, long rows, long size) {
    share_out(rows, true, [&](long row) {
        const long k = top_k[row] > 0 && top_k[row] < size ? top_k[row] : 0;
        out[row] = -INFINITY;
        last[row] = int32_t(size);
        if (temperature[row] == 0 || (!k && top_p[row] >= 1 && min_p[row] <= 0)) return;
        float *x = scratch<float>(6, size), *mass = scratch<float>(7, size);
        for (long i = 0; i < size; i++) x[i] = wide(logits[row * size + i]) / temperature[row];
        const float top = *std::max_element(x, x + size);
        float floor = min_p[row] > 0 ? top + std::log(min_p[row]) : -INFINITY;
        if (k) floor = cut(x, size, floor, double(k), [](long) { return 1.0; }).floor;
        if (top_p[row] < 1) {
            for (long i = 0; i < size; i++) mass[i] = x[i] >= floor ? fast_exp(x[i] - top) : 0.0f;
            // Above 0, also where float32 rounds top_p to 0: one token at least must stay.
            const double target = std::max(top_p[row] * sum_of<double>(mass, size), 1e-300);
            const Floor found = cut(x, size, floor, target, [&](long i) { return mass[i]; });
            // Of equals at the floor only as many stay as it takes, the lowest ids; one at least.
            double above = found.above;
            for (long i = 0; i < size; i++)
                if (x[i] == found.floor) {
                    last[row] = int32_t(i);
                    if ((above += mass[i]) >= target) break;
                }
            floor = found.floor;
        }
        out[row] = floor;
    });
}

// SplitMix64 of seed and position, as in ops.py: 40 bits in [0, 1).
inline double uniform(uint64_t seed, uint64_t position) {
    uint64_t x = seed + position * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return double((x ^ (x >> 31)) >> 24) * 0x1p-40;
}

constexpr long PART = 256;  // tokens whose weights are summed up, so that a draw skips most parts

// By inverse CDF: the first token whose cumulated weight exceeds the row's random number.
template <class T>
void sample_tokens(const T *logits, const float *temperature, const int64_t *seeds,
                   const int64_t *positions, const float *floor, const int32_t *last, int64_t *out,
                   long rows, long size) {
    argmax(logits, out, rows, size);
    share_out(rows, rows * size > 8192, [&](long row) {
        if (temperature[row] == 0 || out[row] < 0) return;
        const T *x = logits + row * size;
        const float heat = temperature[row], top = wide(x[out[row]]) / heat;
        const float least = floor ? floor[row] : -INFINITY;
        const int last_id = last ? last[row] : int(size);
        float *weights = scratch<float>(6, size);
        std::vector<double> parts(ceil_div(size, PART));
        for (int i = 0; i < int(size); i++) {
            const float one = wide(x[i]) / heat;
            const bool stays = (one > least) | ((one == least) & (i <= last_id));
            weights[i] = stays ? fast_exp(one - top) : 0.0f;
        }
        for (long i = 0; i < size; i += PART)
            parts[i / PART] = sum_of<double>(weights + i, std::min(PART, size - i));
        double left = std::accumulate(parts.begin(), parts.end(), 0.0)
            * uniform(uint64_t(seeds[row]), uint64_t(positions[row]));
        size_t part = 0;
        while (part + 1 < parts.size() && left >= parts[part]) left -= parts[part++];
        const long end = std::min((long(part) + 1) * PART, size);
        for (long i = long(part) * PART; i < end; i++) {
            if (weights[i] > 0) out[row] = i;  // rounding may end it early: the last with a weight
            if ((left -= weights[i]) < 0) break;
        }
    });
}

}  // namespace

extern "C" const char *const multiplies[] = {NAME, HAS_TILES ? tiles::NAME : NAME_OF_BFLOAT16};
extern "C" const void *const products[] = BOTH(multiply_by);
extern "C" const void *const mixtures[] = BOTH(mixture);
extern "C" const void *const layers[] = BOTH(decoder_layers);
extern "C" const Function functions[] = {
    FUNCTION(prepack, T weight[count outputs inputs], i32 packed[count panels units _lanes]),
    FUNCTION(product, T x[rows inputs], panels weight[outputs inputs], T? bias[outputs] ->
             T out[rows outputs]),
    FUNCTION(wide_product, T x[rows inputs], panels weight[outputs inputs], T? bias[outputs] ->
             f32 out[rows outputs]),
    FUNCTION(add_rms_norm, T x[rows size], T? residual[rows size], f32 weight[size], float eps ->
             T out[rows size], T total[rows size]),
    FUNCTION(act_and_mul, T gate_up[rows _both], long is_gelu -> T out[rows size]),
    FUNCTION(experts, T hidden[tokens size], f32 weights[tokens chosen], i64 ids[tokens chosen],
             panels gate_up[count _both size], panels down[count size inner], long first_expert,
             long is_gelu -> T out[tokens size]),
    FUNCTION(norm_rope_store, T qkv[tokens _heads size], f32? q_weight[size], f32? k_weight[size],
             float eps, f32 cos[tokens size], f32 sin[tokens size],
             cache k[_blocks block_size kv_heads stored],
             cache v[_blocks block_size kv_heads stored], i32 slots[tokens] ->
             T q[tokens heads size]),
    FUNCTION(paged_attention, T q[tokens heads size],
             cache k[_blocks block_size kv_heads stored],
             cache v[_blocks block_size kv_heads stored], i32 tables[rows width],
             i32 seq_lens[rows], i32 starts[_ends], float scale, long window, float softcap,
             f32? sinks[heads], i32? last[tokens] -> T out[tokens heads size]),
    FUNCTION(argmax, T logits[rows size] -> i64 out[rows]),
    FUNCTION(thresholds, T logits[rows size], f32 temperature[rows], i32 top_k[rows],
             f32 top_p[rows],
             f32 min_p[rows] -> f32 out[rows], i32 last[rows]),
    FUNCTION(sample_tokens, T logits[rows size], f32 temperature[rows], i64 seeds[rows],
             i64 positions[rows], f32? floor[rows], i32? last[rows] -> i64 out[rows]),
    {}};
