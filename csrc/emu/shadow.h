// Who touched which word last: the race detector's memory of memory.
//
// A cell covers 4 bytes: the last write, and up to two reads since. The detector never depends on the interleaving that
// happened: two accesses conflict unless a happens-before path (release -> acquire, barriers, bulk waits) joins them.
#pragma once

#include "view.h"

namespace deep_moe::emu {

enum class StampKind : u8 {
    None,
    Weak,       // generic proxy
    StrongGpu,  // relaxed, acquire, release or atomic of gpu (in shared memory: cta) scope
    StrongSys,
    Barrier,  // asynchronous, ordered by an mbarrier: agent = barrier id, time = its completed phase
    Pending,  // asynchronous, of a bulk group that its thread has not waited for
    Settled   // asynchronous, of a bulk group that its thread has waited for: Weak, but its own copies need no fence
};

struct Stamp {
    u32 time;
    u16 agent;
    u8 lane;
    StampKind kind : 4;
    u8 bytes : 4;  // which bytes of the cell
};
static_assert(sizeof(Stamp) == 8);

struct ReadStamp {
    u32 time;
    u16 agent;
    StampKind kind;
    u8 bytes;
    u32 lanes;
};
static_assert(sizeof(ReadStamp) == 12);

struct Cell {
    Stamp write;
    ReadStamp reads[2];
};
static_assert(sizeof(Cell) == 32);

constexpr u32 kCellBytes = 4;

// Cells of one range of memory; untouched cells cost address space only.
class Shadow {
public:
    Shadow() = default;
    Shadow(const u8* base, u64 bytes);
    Shadow(Shadow&& o) noexcept { swap(o); }
    Shadow& operator=(Shadow&& o) noexcept {
        swap(o);
        return *this;
    }
    ~Shadow();

    explicit operator bool() const { return cells_ != nullptr; }
    bool contains(const void* p) const { return p >= base_ && p < base_ + bytes_; }
    Cell* cell(const void* p) const { return cells_ + (static_cast<const u8*>(p) - base_) / kCellBytes; }
    void clear();

private:
    void swap(Shadow& o) noexcept;
    const u8* base_ = nullptr;
    u64 bytes_ = 0;
    Cell* cells_ = nullptr;
};

}  // namespace deep_moe::emu
