// The scheduler's random numbers: small, fast, the same everywhere.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe::emu {

class Random {
public:
    explicit Random(u64 seed = 0) : state_(seed) {}
    void mix(u64 value) { state_ = next() ^ (value * 0xd1342543de82ef95ull); }
    u64 next() {  // splitmix64
        u64 z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    u32 below(u32 n) { return u32((next() >> 32) * n >> 32); }
    bool one_in(u32 n) { return below(n) == 0; }
    // 1 .. 2^max_log2, small values as likely as large ones.
    u32 log_uniform(u32 max_log2) { return 1 + below(1u << below(max_log2 + 1)); }

private:
    u64 state_;
};

}  // namespace deep_moe::emu
