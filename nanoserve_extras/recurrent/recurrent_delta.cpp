// The gated delta rule for CPUs. Its formula is in recurrent_delta.py.
//
// A portion is one head of one row: 64 columns of its state stay in a core's first cache while all
// of the row's tokens are processed in order; then come the next columns.
//
//     state of a head, (key_size, size)      | 0..63 | 64..127 | ...
//
// Every sum is made by one thread in a fixed order: a row's numbers don't depend on the rows beside
// it, nor on the threads. Shapes and dtypes are checked in build.py. Built by build.py.

#include "library.h"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
constexpr long COLUMNS = 64;  // a state's columns are independent: with 128 keys 32 KB
constexpr int WIDTH = COLUMNS / LANES;
using Line = Vector[WIDTH];

template <class T> void make_unit(const T *x, float *out, long size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < size; i++) sum += wide(x[i]) * wide(x[i]);
    const float factor = 1 / std::sqrt(sum + 1e-6f);
    for (long i = 0; i < size; i++) out[i] = wide(x[i]) * factor;
}

// One token. S: (key_size, COLUMNS). v becomes S^T q.
inline void fold(Line *S, const float *q, const float *k, Line &v, float decay, float beta,
                 long key_size) {
    Vector held[WIDTH] = {}, read[WIDTH] = {};
    for (long i = 0; i < key_size; i++)
        for (int c = 0; c < WIDTH; c++) held[c] += S[i][c] * k[i];
    for (int c = 0; c < WIDTH; c++) held[c] = (v[c] - held[c] * decay) * beta;
    for (long i = 0; i < key_size; i++)
        for (int c = 0; c < WIDTH; c++) {
            S[i][c] = S[i][c] * decay + held[c] * k[i];
            read[c] += S[i][c] * q[i];
        }
    std::memcpy(v, read, sizeof v);
}

template <class T>
void delta_rule(const T *qkv, const float *decay, const float *beta, float *states,
                const int64_t *sources, const int64_t *slots, const int32_t *starts, T *out, long,
                long channels, long heads, long key_size, long size, long rows) {
    const long keys = (channels - heads * size) / 2, group = heads * key_size / keys;
    const float scale = 1 / std::sqrt(float(key_size));
    share_out(rows * heads, true, [&](long i) {
        const long row = i / heads, head = i % heads;
        float *q = scratch<float>(1, 2 * key_size), *k = q + key_size;
        Line *S = scratch<Line>(0, key_size);
        for (long first = 0; first < size; first += COLUMNS) {
            const long width = std::min(COLUMNS, size - first);
            const auto state_at = [&](long slot) {
                return states + (slot * heads + head) * key_size * size + first;
            };
            const float *state = state_at(sources[row]);
            for (long j = 0; j < key_size; j++) std::memcpy(S[j], state + j * size, 4 * width);
            for (long t = starts[row], end = starts[row + 1]; t < end; t++) {
                const T *x = qkv + t * channels + head / group * key_size;
                make_unit(x, q, key_size);
                make_unit(x + keys, k, key_size);
                x = qkv + t * channels + 2 * keys + head * size + first;
                Line v = {};
                float numbers[COLUMNS] = {};
                for (long c = 0; c < width; c++) numbers[c] = wide(x[c]);
                std::memcpy(v, numbers, sizeof v);
                fold(S, q, k, v, decay[t * heads + head], beta[t * heads + head], key_size);
                std::memcpy(numbers, v, sizeof v);
                T *to = out + (t * heads + head) * size + first;
                for (long c = 0; c < width; c++) narrow(numbers[c] * scale, to[c]);
                if (t + 1 < end && slots[t + 1] == slots[t]) continue;
                float *left = state_at(slots[t]);
                for (long j = 0; j < key_size; j++) std::memcpy(left + j * size, S[j], 4 * width);
            }
        }
    });
}

}  // namespace

extern "C" const Function functions[] = {
    FUNCTION(delta_rule, T qkv[tokens channels], f32 decay[tokens heads], f32 beta[tokens heads],
             f32 states[_states heads key_size size], i64 sources[rows], i64 slots[tokens],
             i32 starts[_ends] -> T out[tokens heads size]),
    {}};
