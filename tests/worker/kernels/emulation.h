// What decode_attention.cu needs of a GPU, emulated on a CPU: every thread of a block is a coroutine of its own, which
// runs until it must wait for others, in an order that is drawn. Instructions of a whole warp follow the PTX manual's tables of fragments.
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

typedef unsigned short T16;
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int MOST_SHARED = 1 << 16;

struct Barrier {
    int size, arrived = 0, round = 0;
};
struct Warp {
    Barrier barrier{32};
    unsigned bits[32][6];
    float floats[32][4];
    bool flags[32];
};
struct Block {
    Barrier barrier{WARPS * 32};
    Warp warps[WARPS];
    std::vector<char> shared;
};
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool done = false;
};
static Block* block;
static int current;
static ucontext_t scheduler;
static std::vector<std::unique_ptr<Thread>> threads;

static void wait(Barrier& barrier) {
    const int round = barrier.round;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.round;
        return;
    }
    while (barrier.round == round) swapcontext(&threads[current]->context, &scheduler);
}
static Warp& warp_of_current() { return block->warps[current / 32]; }
static int lane_of_current() { return current % 32; }

#define DEVICE static
#define KERNEL static void
#define SHARED(type, name) static_assert(sizeof(type) <= MOST_SHARED); type& name = *(type*)block->shared.data()
#define THREAD current
#define SYNC_THREADS() wait(block->barrier)
#define THREAD_FENCE()
static void after_previous() {}
static void let_others_go_on() { swapcontext(&threads[current]->context, &scheduler); }
static int atomicAdd(int* to, int more) {
    let_others_go_on();
    const int before = *to;
    *to += more;
    let_others_go_on();
    return before;
}

static float value_of(T16 bits) {
#ifdef BF16
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
#else
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
#endif
}
static T16 bits_of(float x) {
#ifdef BF16
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (x != x) return 0x7fff;
    return (T16)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
#else
    const _Float16 narrow = (_Float16)x;
    T16 bits;
    memcpy(&bits, &narrow, 2);
    return bits;
#endif
}
static unsigned pack(float low, float high) { return bits_of(low) | (unsigned)bits_of(high) << 16; }
static float half_of(unsigned pair, int which) { return value_of((T16)(pair >> 16 * which)); }
static uint4 load16(const T16* from) {
    if ((uintptr_t)from % 16) abort();  // as the GPU would
    uint4 x;
    memcpy(&x, from, 16);
    return x;
}
static uint4 stream16(const T16* from) { return load16(from); }
static float power_of_2(float x) { return exp2f(x); }
static float fresh(const float* from) { return *from; }
static float4 fresh4(const float* from) { return *(const float4*)from; }
static void store4(T16* to, float4 x, float scale) {
    const unsigned pairs[2] = {pack(x.x * scale, x.y * scale), pack(x.z * scale, x.w * scale)};
    memcpy(to, pairs, 8);
}
static unsigned permute(unsigned a, unsigned b, unsigned which) {
    const uint64_t both = a | (uint64_t)b << 32;
    unsigned x = 0;
    for (int i = 0; i < 4; ++i) x |= (unsigned)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return x;
}
static bool any_lane(bool x) {
    Warp& warp = warp_of_current();
    warp.flags[lane_of_current()] = x;
    wait(warp.barrier);
    const bool any = std::any_of(warp.flags, warp.flags + 32, [](bool flag) { return flag; });
    wait(warp.barrier);
    return any;
}
static float shuffle_xor(float x, int distance) {
    Warp& warp = warp_of_current();
    warp.floats[lane_of_current()][0] = x;
    wait(warp.barrier);
    const float other = warp.floats[lane_of_current() ^ distance][0];
    wait(warp.barrier);
    return other;
}
static unsigned transpose(unsigned x) {
    Warp& warp = warp_of_current();
    const int lane = lane_of_current(), row = lane / 4, column = lane % 4 * 2;
    warp.bits[lane][0] = x;
    wait(warp.barrier);
    unsigned y = 0;
    for (int i = 0; i < 2; ++i)
        y |= (warp.bits[(column + i) * 4 + row / 2][0] >> 16 * (row % 2) & 0xffff) << 16 * i;
    wait(warp.barrier);
    return y;
}
static void mma(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    Warp& warp = warp_of_current();
    const int lane = lane_of_current();
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(warp.bits[lane], mine, sizeof(mine));
    wait(warp.barrier);
    auto a = [&](int row, int k) {  // row 16 x column 16
        return half_of(warp.bits[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
    };
    auto b = [&](int k, int column) {  // row 16 x column 8
        return half_of(warp.bits[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    };
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        sums[i] = c[i];
        for (int k = 0; k < 16; ++k) sums[i] += a(row, k) * b(k, column);
    }
    wait(warp.barrier);
    memcpy(c, sums, sizeof(sums));
}

// Runs the blocks of a launch beside each other: which block goes on, which of its threads and in what order is drawn.
static void launch(int num_blocks, const std::function<void()>& kernel) {
    static std::mt19937 draw(1);
    static std::function<void()> body;
    body = kernel;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::vector<std::unique_ptr<Thread>>> all(num_blocks);
    for (int number = 0; number < num_blocks; ++number) {
        blocks.push_back(std::make_unique<Block>());
        blocks[number]->shared.assign(MOST_SHARED, (char)0xff);  // what was never written is not a number
        for (int i = 0; i < WARPS * 32; ++i) {
            all[number].push_back(std::make_unique<Thread>());
            Thread& thread = *all[number].back();
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.data();
            thread.context.uc_stack.ss_size = thread.stack.size();
            thread.context.uc_link = &scheduler;
            makecontext(&thread.context, (void (*)())+[] { body(); threads[current]->done = true; }, 0);
        }
    }
    std::vector<int> order(WARPS * 32), open(num_blocks);
    std::iota(order.begin(), order.end(), 0);
    std::iota(open.begin(), open.end(), 0);
    while (!open.empty()) {
        const int place = draw() % open.size(), number = open[place];
        block = blocks[number].get();
        threads.swap(all[number]);
        std::shuffle(order.begin(), order.end(), draw);
        int left = 1 + draw() % (WARPS * 32);  // only some of its threads go on now
        bool any = false;
        for (int i : order)
            if (!threads[i]->done) {
                any = true;
                if (left-- <= 0) break;
                current = i;
                swapcontext(&scheduler, &threads[i]->context);
            }
        threads.swap(all[number]);
        if (!any) open.erase(open.begin() + place);
    }
}
