// What compiled libraries share: dtypes, threads, and the table by which library.py finds their
// functions. device/cpu.cpp and quantization/quantized_linear.cpp include it.
//
// Weights lie in *panels* of 16 outputs in both: see cpu.cpp. A product is cut into portions of some
// rows and some panels. Threads are OpenMP's, which torch has started. They take small portions one
// by one: one that loses its core delays only its portion.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

extern "C" int omp_get_num_threads();  // without omp.h, which Apple's compiler lacks

namespace {

// ------------------------------------------------------------------ numbers

constexpr long PANEL = 16;  // outputs that stand side by side

struct BFloat16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline float wide(float x) { return x; }
inline float wide(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline void narrow(float x, float &out) { out = x; }
inline void narrow(float x, BFloat16 &out) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits = as_bits(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

// Some outputs of a row: its sums, and their bias or null.
template <class T> void put_row(const float *sums, const T *bias, T *out, long count) {
    for (long i = 0; i < count; i++) narrow(bias ? sums[i] + wide(bias[i]) : sums[i], out[i]);
}

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// Memory of the calling thread, kept between calls: the first use of a new page costs more than the
// arithmetic on it. place: a number for each use. The memory is aligned to a line of the cache.
template <class X> X *scratch(int place, long count) {
    static thread_local std::vector<uint64_t> memory[8];
    const size_t words = size_t(count) * sizeof(X) / 8 + 16;
    if (memory[place].size() < words) memory[place] = std::vector<uint64_t>(words);
    return reinterpret_cast<X *>((uintptr_t(memory[place].data()) + 63) / 64 * 64);
}

// ------------------------------------------------------------------ threads

// Call work(i) for each i below `count`, on all of torch's threads if it is worth it. Each takes
// the next one that is left, so that a slow thread takes fewer.
//
// A thread that finds nothing left waits for the others, and soon it sleeps: where another program
// has taken a core, one of our threads wants the other core, and must not find it busy waiting.
template <class Work> void share_out(long count, bool is_worth_it, const Work &work) {
    std::atomic<long> next{0};
    std::atomic<int> done{0};
#pragma omp parallel if (is_worth_it && count > 1)
    {
        for (long i; (i = next++) < count;) work(i);
        done++;
        for (long turns = 0; done < omp_get_num_threads(); turns++)
            if (turns > 20000) std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
}

// Rows that stay in a core's cache while panels pass by. A tile of more than 16 is for matrix tiles,
// which multiply so fast that panels must be read less often.
constexpr long row_block(long tile_rows) { return tile_rows > 16 ? 256 : 128; }
constexpr long PANELS_AT_ONCE = 8;  // a portion: of 1024 inputs in bfloat16 256 KB, in int8 128 KB

// The portions of a product: work(first_tile, end_tile, first_panel, end_panel). A tile is
// `tile_rows` rows.
template <class Work>
void share_product(long tiles, long tile_rows, long panels, bool is_worth_it, const Work &work) {
    const long tiles_at_once = std::max<long>(1, row_block(tile_rows) / tile_rows);
    const long groups = ceil_div(panels, PANELS_AT_ONCE);
    share_out(ceil_div(tiles, tiles_at_once) * groups, is_worth_it, [&](long portion) {
        const long tile = portion / groups * tiles_at_once;
        const long panel = portion % groups * PANELS_AT_ONCE;
        work(tile, std::min(tile + tiles_at_once, tiles), panel,
             std::min(panel + PANELS_AT_ONCE, panels));
    });
}

}  // namespace

// ------------------------------------------------------------ for library.py

// Each function's name, what it takes and gives, and where it lies for each dtype. Behind all that
// a function gets the sizes, in the order in which they are named; no _sizes.
struct Function { const char *signature; void *for_float32, *for_bfloat16; };
#define FUNCTION(name, ...) {#name ": " #__VA_ARGS__, (void *)name<float>, (void *)name<BFloat16>}
