// Matrix tiles (AMX) for a CPU that has none. Such a CPU traps at each of their instructions, and
// here they are done by Intel's manual (volume 2, "TDPBF16PS" and the pages around it), bit for bit,
// with its checks of shapes. Each thread's registers belong to somebody else in the beginning, as if
// oneDNN had shaped them: FOREIGN.

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

namespace {

struct Config { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t lines[16]; };
const Config FOREIGN = {1, 0, {}, {16, 64, 8, 4, 64, 64, 64, 12}, {3, 16, 1, 2, 16, 16, 7, 4}};
thread_local Config config = FOREIGN;
thread_local uint32_t registers[8][16][16];
std::atomic<long> products{0}, borrowed{0};

void demand(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "tile_traps: %s\n", what);
    std::abort();
}
float wide(uint32_t bits) {  // numbers below the smallest normal one count as 0
    float x;
    std::memcpy(&x, &bits, 4);
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

void load_config(const void *at) {
    Config one;
    std::memcpy(&one, at, 64);
    bool is_right = one.palette <= 1 && one.start == 0;
    for (int i = 0; i < 16; i++) {
        is_right &= one.lines[i] <= 16 && one.bytes[i] <= 64 && (i < 14 ? !one.reserved[i] : true);
        is_right &= i < 8 || (!one.lines[i] && !one.bytes[i]);
        is_right &= !one.lines[i] == !one.bytes[i];
    }
    demand(is_right, "ldtilecfg of what is no configuration");
    borrowed += int(!std::memcmp(&config, &FOREIGN, 64)) - int(!std::memcmp(&one, &FOREIGN, 64));
    config = one;
    std::memset(registers, 0, sizeof registers);
}

void move(int r, char *at, long stride, bool to_memory) {
    demand(config.palette && config.lines[r], "a tile that has no shape");
    if (!to_memory) std::memset(registers[r], 0, sizeof registers[r]);
    for (int i = 0; i < config.lines[r]; i++)
        if (to_memory) std::memcpy(at + i * stride, registers[r][i], config.bytes[r]);
        else std::memcpy(registers[r][i], at + i * stride, config.bytes[r]);
}

void multiply_add(int sums, int a, int b) {
    demand(config.palette && sums != a && sums != b && a != b && config.bytes[a] % 4 == 0
           && config.bytes[a] / 4 == config.lines[b] && config.lines[a] == config.lines[sums]
           && config.bytes[b] == config.bytes[sums], "tdpbf16ps of shapes that don't fit");
    for (int row = 0; row < config.lines[sums]; row++)
        for (int o = 0; o < config.bytes[sums] / 4; o++) {
            float first = 0, second = 0;
            for (int u = 0; u < config.lines[b]; u++) {
                const uint32_t x = registers[a][row][u], y = registers[b][u][o];
                first = flushed(std::fma(wide(x << 16), wide(y << 16), first));
                second = flushed(std::fma(wide(x & 0xffff0000u), wide(y & 0xffff0000u), second));
            }
            const float sum = flushed(wide(registers[sums][row][o]) + flushed(first + second));
            std::memcpy(&registers[sums][row][o], &sum, 4);
        }
    products++;
}

// A general register by its number in an instruction.
greg_t &numbered(gregset_t &all, int number) {
    static const int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                 REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                 REG_R12, REG_R13, REG_R14, REG_R15};
    return all[places[number]];
}

void trap(int, siginfo_t *, void *context) {
    gregset_t &all = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    const uint8_t *code = reinterpret_cast<const uint8_t *>(all[REG_RIP]);
    const int prefix = code[2] & 3, op = code[3], mod = code[4] >> 6, reg = code[4] >> 3 & 7;
    const int rm = code[4] & 7;  // prefixes: 0 none, 1 66, 2 F3, 3 F2
    if (code[0] != 0xc4 || (code[1] & 31) != 2 || (op != 0x49 && op != 0x4b && op != 0x5c)) {
        std::signal(SIGILL, SIG_DFL);
        return;
    }
    const uint8_t *end = code + 5;
    char *at = nullptr;
    long stride = 0;
    if (mod != 3) {
        long address = 0, base = rm;
        if (rm == 4) {
            const int index = (*end >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
            if (index != 4) stride = numbered(all, index) << (*end >> 6);
            base = *end++ & 7;
        }
        demand(base != 5 || mod, "an address without a register");
        address = numbered(all, int(base) | (code[1] & 0x20 ? 0 : 8));
        if (mod == 1) address += int8_t(*end++);
        if (mod == 2) {
            int32_t far;
            std::memcpy(&far, end, 4);
            address += far, end += 4;
        }
        at = reinterpret_cast<char *>(address);
    }
    if (op == 0x5c && prefix == 2 && mod == 3) multiply_add(reg, rm, ~code[2] >> 3 & 15);
    else if (op == 0x4b && prefix == 3 && rm == 4) move(reg, at, stride, false);
    else if (op == 0x4b && prefix == 2 && rm == 4) move(reg, at, stride, true);
    else if (op == 0x49 && prefix == 3 && mod == 3) std::memset(registers[reg], 0, 1024);
    else if (op == 0x49 && prefix == 0 && mod != 3) load_config(at + stride);
    else if (op == 0x49 && prefix == 1 && mod != 3) std::memcpy(at + stride, &config, 64);
    else demand(false, "an instruction that is not known here");
    all[REG_RIP] = greg_t(end);
}

}  // namespace

extern "C" {
void start() {
    struct sigaction action = {};
    action.sa_sigaction = trap;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}
long count_products() { return products; }
long count_borrowed() { return borrowed; }
}
