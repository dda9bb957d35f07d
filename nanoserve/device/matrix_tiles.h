// Matrix tiles (AMX, on Intel's CPUs since 2023): eight registers of up to 16 lines of 64 bytes. One
// instruction adds the product of two of them to a third, which has 16 x 16 sums:
//
//     A: 16 rows, a line of 16 units each     B: 16 units, a line of 16 outputs each     sums += A B
//
// A unit is two bfloat16, so **16 neighbouring units of a panel (cpu.cpp) are a B as they lie**:
// neither weights nor the KV cache have another layout for it. Rows are packed into A's.
//
// Each operation has two bodies: the instruction, and plain loops over float that mean the same. So
// the loop on tiles is held to the oracles of `ops` on any CPU. Flags of the compiler (build.py):
//
//     -DMATRIX_TILES     products of bfloat16 are made on tiles
//     -DPLAIN_TILES      ... by the plain loops, also on a CPU that has the instructions
//
// Every number of rows is multiplied by the same instructions in the same order, one row too: so a
// row's bits don't depend on the rows beside it.

#pragma once

#include "library.h"

namespace {

#ifdef MATRIX_TILES
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
template <class T> constexpr bool ON_TILES = HAS_TILES && sizeof(T) == 2;
constexpr long TILE = 16;  // rows, units or outputs of a register

// ------------------------------------------------------------ the operations

namespace tiles {

// Of each register how many lines it has, and bytes a line. As the CPU defines it.
struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
};
static_assert(sizeof(Config) == 64, "what the CPU reads");

#if defined(__AMX_BF16__) && !defined(PLAIN_TILES)
constexpr const char *NAME = "AMX bfloat16";
// Written as asm, which says what memory is read. GCC 12's intrinsics don't: _tile_loadconfig names
// 8 bytes of 64, so stores into the others are dropped (llama.cpp built with it dies of this), and
// _tile_loadd names none, so that a store into a tile's memory may come after it.
struct Lines { char bytes[TILE * 64]; };
inline void load_config(const Config &config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void store_config(Config &config) { asm volatile("sttilecfg %0" : "=m"(config)); }
template <int R> void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(R)); }
template <int R> void load(const void *at, long stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(R), "r"(at), "r"(stride) : "memory");
}
template <int R> void store(void *at, long stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(R), "r"(at), "r"(stride) : "memory");
}
template <int SUMS, int A, int B> void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#else
constexpr const char *NAME = "matrix tiles by plain loops, very slow";
inline thread_local uint32_t registers[8][TILE][TILE];
inline thread_local Config configured;
inline void load_config(const Config &config) {
    configured = config;
    std::memset(registers, 0, sizeof registers);
}
inline void store_config(Config &config) { config = configured; }
template <int R> void zero() { std::memset(registers[R], 0, sizeof registers[R]); }
template <int R> void load(const void *at, long stride) {
    zero<R>();
    for (int i = 0; i < configured.lines[R]; i++)
        std::memcpy(registers[R][i], static_cast<const char *>(at) + i * stride,
                    configured.bytes[R]);
}
template <int R> void store(void *at, long stride) {
    for (int i = 0; i < configured.lines[R]; i++)
        std::memcpy(static_cast<char *>(at) + i * stride, registers[R][i], configured.bytes[R]);
}
template <int SUMS, int A, int B> void multiply_add() {
    for (int row = 0; row < TILE; row++) {
        float first[TILE] = {}, second[TILE] = {};  // of a unit's numbers
        for (int u = 0; u < configured.lines[B]; u++) {
            const uint32_t a = registers[A][row][u];
            for (int o = 0; o < TILE; o++) {
                const uint32_t b = registers[B][u][o];
                first[o] += as_float(a << 16) * as_float(b << 16);
                second[o] += as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u);
            }
        }
        for (int o = 0; o < TILE; o++) {
            uint32_t &sum = registers[SUMS][row][o];
            sum = as_bits(as_float(sum) + (first[o] + second[o]));
        }
    }
}
#endif

inline thread_local long shaped = 0;  // units of an A's line; 0: the registers are others'

// Registers 0-3 are sums, 4 and 5 A's, 6 and 7 B's. units: 16, or 8 where a panel has half a tile.
inline void shape(long units) {
    if (shaped == units) return;  // it takes longer than a product
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.lines[i] = uint8_t(i < 6 ? TILE : units);
        config.bytes[i] = uint16_t(4 * (i == 4 || i == 5 ? units : TILE));
    }
    load_config(config);
    shaped = units;
}

// torch's oneDNN multiplies in the same threads, on tiles of another shape. While this lives they
// are ours; then the shape is again what it was.
template <bool WANTED> struct Borrowed {
    Config before;
    Borrowed() { if constexpr (WANTED) store_config(before); }
    ~Borrowed() {
        if constexpr (WANTED) load_config(before), shaped = 0;
    }
};

}  // namespace tiles

// ------------------------------------------------------------------- the loop

// A panel's units for so many inputs: filled up to half a tile, so that none reaches into the next
// panel. And the room of a packed row, whose tiles are whole.
constexpr long HALF = TILE / 2;
template <class T> constexpr long PER_UNIT = 4 / sizeof(T);  // numbers
template <class T> long units_in(long inputs) {
    return ceil_div(inputs, PER_UNIT<T> * HALF) * HALF;
}
template <class T> long room_for(long inputs) { return units_in<T>(inputs) + HALF; }

// A row of `count` numbers goes to its place in `tile_rows` rows: (units / 16, tile_rows, 16). Zeros
// fill its last tile, or all of them where x is null.
template <class T> void put_on_tile(const T *x, long count, int row, int tile_rows, uint32_t *out) {
    for (long i = 0; i < count; i += 2 * TILE) {
        const long here = x ? std::min(2 * TILE, count - i) : 0;
        uint32_t *line = out + i / 2 * tile_rows + row * TILE;
        if (here < 2 * TILE) std::memset(line, 0, 64);
        if (here == 2 * TILE) std::memcpy(line, x + i, 64);  // of a size that the compiler knows
        else if (here) std::memcpy(line, x + i, here * sizeof(T));
    }
}

// `multiply` of cpu.cpp: R is 16 or 32, P is 1 or 2. Four sums at most, which don't wait for each
// other, and each A and B serves two of them.
template <int R, int P>
void multiply_on_tiles(const uint32_t *rows, const float *, const uint32_t *const *panels,
                       const uint32_t *const *next, long segments, long units, float *out,
                       long stride, bool add) {
    constexpr bool LOW = R > TILE, RIGHT = P > 1;
    const long step = units % TILE ? HALF : TILE, line = 4 * stride;
    float *low = out + TILE * stride;
    tiles::shape(step);
    if (add) {
        tiles::load<0>(out, line);
        if constexpr (RIGHT) tiles::load<1>(out + TILE, line);
        if constexpr (LOW) tiles::load<2>(low, line);
        if constexpr (LOW && RIGHT) tiles::load<3>(low + TILE, line);
    } else tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
    long unit = 0;
    for (long s = 0; s < segments; s++, panels += P, next += next ? P : 0)
        for (long u = 0; u < units; u += step, unit += step) {
            const uint32_t *a = rows + unit / TILE * R * TILE + unit % TILE;
            tiles::load<4>(a, 64);
            tiles::load<6>(panels[0] + u * PANEL, 64);
            tiles::multiply_add<0, 4, 6>();
            if constexpr (RIGHT) {
                tiles::load<7>(panels[1] + u * PANEL, 64);
                tiles::multiply_add<1, 4, 7>();
            }
            if constexpr (LOW) {
                tiles::load<5>(a + TILE * TILE, 64);
                tiles::multiply_add<2, 5, 6>();
            }
            if constexpr (LOW && RIGHT) tiles::multiply_add<3, 5, 7>();
            for (int p = 0; next && p < P; p++)
                for (long i = u; i < u + step; i++)
                    __builtin_prefetch(next[p] + i * PANEL, 0, 2);
        }
    tiles::store<0>(out, line);
    if constexpr (RIGHT) tiles::store<1>(out + TILE, line);
    if constexpr (LOW) tiles::store<2>(low, line);
    if constexpr (LOW && RIGHT) tiles::store<3>(low + TILE, line);
}

using MultiplyOnTiles = decltype(&multiply_on_tiles<16, 1>);

// The loop for a tile of `rows` rows, 16 or 32, and `panels` panels, 1 or 2.
inline MultiplyOnTiles loop_on_tiles(int rows, long panels) {
    static constexpr MultiplyOnTiles loops[2][2] = {
        {multiply_on_tiles<16, 1>, multiply_on_tiles<16, 2>},
        {multiply_on_tiles<32, 1>, multiply_on_tiles<32, 2>}};
    return loops[rows > TILE][panels > 1];
}

}  // namespace
