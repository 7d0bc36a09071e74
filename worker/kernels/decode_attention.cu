// Paged decode attention for Hopper: one query token per sequence against its KV pages, without shared memory on the
// way of K and V. Each warp loads 16 or 32 tokens' K and V into registers, in the very places where the tensor cores
// want them: the sums over head dim and over tokens may take any order, so each lane loads 16 bytes that lie together
// and the queries are permuted alike. Scores are computed as K q^T and outputs as V^T p^T (tokens and head dim on the long
// side of the instruction), so that few query heads waste little.
//
// Compiled with T16 (a 16-bit float), HEAD_DIM, KV_HEADS, GROUP, PAGE_SIZE, WARPS, GROUPS and, before it, the few
// functions that differ between a GPU and the emulation that tests run on: see decode_attention_cuda.py.

constexpr int CHUNKS = HEAD_DIM / 32;  // of K: a quad of lanes loads 32 values of a token at once
constexpr int HALVES = HEAD_DIM / 64;  // of V: eight lanes load 64 values of a token at once
constexpr int TILES = HEAD_DIM / 16;
constexpr int TOKENS = 16 * GROUPS;    // that a warp works on at once: more keep more bytes on their way
constexpr float LAZY = 8.0f;           // the maximum is raised only when scores pass it by this factor of 2 (log2)
constexpr float NONE = -1e30f;         // a maximum of nothing

struct alignas(16) Merge {
    float out[WARPS][GROUP][HEAD_DIM];
    float top[WARPS][8], sum[WARPS][8];
};

struct Shared {
    Merge merge[2];
    int work[2];
    int is_last;
};

DEVICE float4 weighted(float4 sum, float4 more, float fade, float grow) {
    return make_float4(sum.x * fade + more.x * grow, sum.y * fade + more.y * grow, sum.z * fade + more.z * grow,
                       sum.w * fade + more.w * grow);
}

struct Unit {
    int row, begin, end, first_part, part, parts, h;
    const int* table;  // the sequence's pages
};

DEVICE Unit unit_of(int work, int total, const int* units, int first_unit, const int* page_table,
                    long long table_stride) {
    if (work >= total) return Unit{0, 0, 0, 0, 0, 0, 0, page_table};
    const int* unit = units + (long long)(first_unit + work / KV_HEADS) * 8;
    return Unit{unit[0], unit[2], unit[3], unit[4], unit[5], unit[6], work % KV_HEADS,
                page_table + unit[1] * table_stride};
}

KERNEL decode(const T16* q, const T16* k_pages, const T16* v_pages, const int* page_table, const int* units,
              const int* span, int* ticket, int* arrived, float* partial_out, float* partial_max, float* partial_sum,
              T16* out, long long q_stride, long long table_stride, long long out_stride, float scale, int helps) {
    SHARED(Shared, shared);
    // A helper reads nothing of the kernel before it: it begins on SMs that this one has left, and ends after it.
    if (!helps) after_previous();
    const int thread = THREAD, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int first_unit = span[0], total = (span[1] - first_unit) * KV_HEADS;
    if (thread == 0) shared.work[1] = atomicAdd(ticket, 1);
    SYNC_THREADS();
    int work = shared.work[1];

    uint4 k[GROUPS][CHUNKS][2], v[GROUPS][HALVES][4];
    const int step = TOKENS * WARPS;
    // Tokens behind the end of a sequence lie in the same page: they may be read, and count for nothing.
    auto load_k = [&](int token, int page, int h) {
        const T16* first = k_pages + (((long long)page * KV_HEADS + h) * PAGE_SIZE + token % PAGE_SIZE) * HEAD_DIM;
        for (int group = 0; group < GROUPS; ++group)
            for (int c = 0; c < CHUNKS; ++c)
                for (int i = 0; i < 2; ++i)
                    k[group][c][i] = stream16(first + (group * 16 + g + 8 * i) * HEAD_DIM + c * 32 + t * 8);
    };
    // The tokens whose values a lane holds.
    auto token_of = [&](int group, int i) { return group * 16 + 2 * t + i % 2 + i / 2 * 8; };
    auto load_v = [&](int token, int page, int h) {
        const T16* first = v_pages + (((long long)page * KV_HEADS + h) * PAGE_SIZE + token % PAGE_SIZE) * HEAD_DIM;
        for (int group = 0; group < GROUPS; ++group)
            for (int half = 0; half < HALVES; ++half)
                for (int i = 0; i < 4; ++i)
                    v[group][half][i] = stream16(first + token_of(group, i) * HEAD_DIM + half * 64 + g * 8);
    };
    auto page_of = [&](const Unit& unit, int token) { return token < unit.end ? unit.table[token / PAGE_SIZE] : 0; };

    Unit now = unit_of(work, total, units, first_unit, page_table, table_stride);
    int token = now.begin + warp * TOKENS, next_page = page_of(now, token + step);
    if (token < now.end) {
        const int page = page_of(now, token);
        load_k(token, page, now.h);
        load_v(token, page, now.h);
    }
    for (int turn = 0; work < total; turn ^= 1) {
        if (thread == 0) shared.work[turn] = atomicAdd(ticket, 1);
        const int row = now.row, h = now.h, end = now.end, parts = now.parts;
        uint4 query[CHUNKS];
        for (int c = 0; c < CHUNKS; ++c) {
            query[c] = make_uint4(0, 0, 0, 0);
            if (g < GROUP) query[c] = load16(q + row * q_stride + (h * GROUP + g) * HEAD_DIM + c * 32 + t * 8);
        }
        // The unit to come is known early: its first tokens are loaded while this one's last ones are worked on.
        SYNC_THREADS();
        const int following = shared.work[turn];
        const Unit then = unit_of(following, total, units, first_unit, page_table, table_stride);
        const int then_token = then.begin + warp * TOKENS, then_page = page_of(then, then_token);
        float top[2] = {NONE, NONE}, sum[2] = {0, 0}, acc[TILES][4];
        for (int i = 0; i < TILES; ++i)
            for (int j = 0; j < 4; ++j) acc[i][j] = 0;

        bool ahead = false;  // whether the next unit's first tokens are on their way
        for (; token < end; token += step) {
            const int next = token + step, page_after = page_of(now, next + step);
            ahead = next >= end;
            const bool load = !ahead || then_token < then.end;
            const int load_token = ahead ? then_token : next, load_page = ahead ? then_page : next_page;
            const int load_h = ahead ? then.h : h;
            // Scores: s[0], s[1] of token g and heads 2t, 2t + 1; s[2], s[3] of token g + 8; of each group.
            float s[GROUPS][4];
            for (int group = 0; group < GROUPS; ++group) {
                for (int j = 0; j < 4; ++j) s[group][j] = 0;
                for (int c = 0; c < CHUNKS; ++c) {
                    const uint4 low = k[group][c][0], high = k[group][c][1];
                    mma(s[group], low.x, high.x, low.y, high.y, query[c].x, query[c].y);
                    mma(s[group], low.z, high.z, low.w, high.w, query[c].z, query[c].w);
                }
                for (int j = 0; j < 4; ++j) s[group][j] *= scale;
            }
            if (load) load_k(load_token, load_page, load_h);
            if (token + TOKENS > end) {  // the same for all lanes
                for (int group = 0; group < GROUPS; ++group) {
                    for (int j = 0; j < 4; ++j)
                        if (token + group * 16 + g + j / 2 * 8 >= end) s[group][j] = NONE;
                    for (int i = 0; i < 4; ++i)
                        if (token + token_of(group, i) >= end)
                            for (int half = 0; half < HALVES; ++half) v[group][half][i] = make_uint4(0, 0, 0, 0);
                }
            }
            float high[2] = {NONE, NONE};
            for (int group = 0; group < GROUPS; ++group)
                for (int j = 0; j < 4; ++j) high[j % 2] = fmaxf(high[j % 2], s[group][j]);
            if (any_lane(high[0] > top[0] + LAZY || high[1] > top[1] + LAZY)) {
                for (int j = 0; j < 2; ++j) {
                    for (int distance = 4; distance < 32; distance *= 2)
                        high[j] = fmaxf(high[j], shuffle_xor(high[j], distance));
                    high[j] = fmaxf(high[j], top[j]);
                    const float fade = power_of_2(top[j] - high[j]);
                    top[j] = high[j];
                    sum[j] *= fade;
                    for (int i = 0; i < TILES; ++i) {
                        acc[i][j] *= fade;
                        acc[i][j + 2] *= fade;
                    }
                }
            }
            for (int group = 0; group < GROUPS; ++group) {
                float* p = s[group];
                for (int j = 0; j < 4; ++j) {
                    p[j] = power_of_2(p[j] - top[j % 2]);
                    sum[j % 2] += p[j];
                }
                const unsigned first8 = transpose(pack(p[0], p[1])), last8 = transpose(pack(p[2], p[3]));
                for (int half = 0; half < HALVES; ++half) {
                    const unsigned* a = &v[group][half][0].x;
                    const unsigned* b = &v[group][half][1].x;
                    const unsigned* c = &v[group][half][2].x;
                    const unsigned* d = &v[group][half][3].x;
                    for (int i = 0; i < 4; ++i)
                        mma(acc[half * 4 + i], permute(a[i], b[i], 0x5410), permute(a[i], b[i], 0x7632),
                            permute(c[i], d[i], 0x5410), permute(c[i], d[i], 0x7632), first8, last8);
                }
            }
            if (load) load_v(load_token, load_page, load_h);
            next_page = page_after;
        }
        if (!ahead && then_token < then.end) {  // this warp had none of the unit's tokens
            load_k(then_token, then_page, then.h);
            load_v(then_token, then_page, then.h);
        }

        // The warps' results into one.
        Merge& merge = shared.merge[turn];
        for (int j = 0; j < 2; ++j) {
            for (int distance = 4; distance < 32; distance *= 2) sum[j] += shuffle_xor(sum[j], distance);
            const int head = 2 * t + j;
            if (head < GROUP) {
                if (g == 0) {
                    merge.top[warp][head] = top[j];
                    merge.sum[warp][head] = sum[j];
                }
                for (int i = 0; i < TILES; i += 2) {
                    float* target = &merge.out[warp][head][i / 4 * 64 + g * 8 + i % 4 * 2];
                    *(float4*)target = make_float4(acc[i][j], acc[i][j + 2], acc[i + 1][j], acc[i + 1][j + 2]);
                }
            }
        }
        SYNC_THREADS();
        const int first_part = now.first_part;
        const long long partial = (long long)(first_part + now.part) * KV_HEADS + h;
        work = following;
        now = then;
        token = then_token;
        next_page = page_of(now, token + step);
        for (int place = thread * 4; place < GROUP * HEAD_DIM; place += WARPS * 32 * 4) {
            const int head = place / HEAD_DIM, d = place % HEAD_DIM;
            float highest = NONE, all = 0;
            for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, merge.top[w][head]);
            float4 value = make_float4(0, 0, 0, 0);
            for (int w = 0; w < WARPS; ++w) {
                const float grow = power_of_2(merge.top[w][head] - highest);
                all += merge.sum[w][head] * grow;
                value = weighted(value, *(const float4*)&merge.out[w][head][d], 1, grow);
            }
            if (parts == 1) {
                store4(out + row * out_stride + (h * GROUP + head) * HEAD_DIM + d, value, 1 / all);
            } else {
                *(float4*)(partial_out + (partial * GROUP + head) * HEAD_DIM + d) = value;
                if (d == 0) {
                    partial_max[partial * 16 + head] = highest;
                    partial_sum[partial * 16 + head] = all;
                }
            }
        }
        if (parts == 1) continue;
        // The block that finishes a sequence's last part merges all of them.
        THREAD_FENCE();
        SYNC_THREADS();
        int* counter = arrived + (long long)first_part * KV_HEADS + h;
        if (thread == 0) shared.is_last = atomicAdd(counter, 1) == parts - 1;
        SYNC_THREADS();
        if (!shared.is_last) continue;
        THREAD_FENCE();
        for (int place = thread * 4; place < GROUP * HEAD_DIM; place += WARPS * 32 * 4) {
            const int head = place / HEAD_DIM, d = place % HEAD_DIM;
            float highest = NONE, all = 0;
            float4 value = make_float4(0, 0, 0, 0);
            for (int i = 0; i < parts; ++i) {
                const long long at = (long long)(first_part + i) * KV_HEADS + h;
                const float other = fresh(partial_max + at * 16 + head), higher = fmaxf(highest, other);
                const float fade = power_of_2(highest - higher), grow = power_of_2(other - higher);
                all = all * fade + fresh(partial_sum + at * 16 + head) * grow;
                value = weighted(value, fresh4(partial_out + (at * GROUP + head) * HEAD_DIM + d), fade, grow);
                highest = higher;
            }
            store4(out + row * out_stride + (h * GROUP + head) * HEAD_DIM + d, value, 1 / all);
        }
        if (thread == 0) *counter = 0;
    }
    if (helps) after_previous();
}
