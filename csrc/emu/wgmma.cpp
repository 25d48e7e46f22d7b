// Warpgroup MMA: operands are read through their descriptors when the instruction is waited for, as late as hardware
// may; the accumulator registers hold NaNs until then.
#include <cstring>

#include "api_functions.h"
#include "collectives.h"
#include "memory.h"

namespace deep_moe::emu {

namespace {

constexpr u32 kSharedWindow = 1024;
constexpr u32 kRowBytes = 32;        // K of one instruction
constexpr u32 kPoison = 0x7fc0dead;  // a NaN
constexpr u32 kRowsOfA = 64;

float poison() {
    float value;
    std::memcpy(&value, &kPoison, 4);
    return value;
}

// A K-major operand with the 128-byte swizzle.
struct Descriptor {
    u32 start, stride;  // shared address; bytes between groups of 8 rows

    // Shared address of 16 bytes of a row. The swizzle acts on address bits.
    u32 chunk(u32 row, u32 half) const {
        const u32 address = start + row / 8 * stride + row % 8 * 128 + half * 16;
        return address ^ (address >> 3 & 0x70);
    }
};

Descriptor decode_descriptor(Fiber* f, u64 bits, const char* operand) {
    const u32 start = u32(bits & 0x3fff) << 4, stride = u32(bits >> 32 & 0x3fff) << 4;
    const u32 base_offset = u32(bits >> 49 & 7), mode = u32(bits >> 62);
    auto check = [&](bool ok, const std::string& rule) {
        if (!ok) fail(f, FaultKind::Protocol, std::string("wgmma descriptor of ") + operand + ": " + rule);
    };
    check(mode == 1, "the emulator knows the 128-byte swizzle (mode 1), not mode " + std::to_string(mode));
    check(base_offset == 0 && (start & 0x380) == 0, "the start must lie in the first row of a 1024-byte aligned group");
    check(stride % 1024 == 0 && stride != 0, "the stride of 8-row groups must be a multiple of 1024 bytes");
    check((start & 0x7f) + kRowBytes <= 128, "the operand leaves its 128-byte rows");
    return {start, stride};
}

// Calls visit(pointer, row, half) for the 16-byte chunks of an operand.
template <typename Visit>
void for_chunks(const Cta& cta, const Descriptor& d, u32 rows, const Visit& visit) {
    for (u32 row = 0; row < rows; ++row)
        for (u32 half = 0; half < 2; ++half) visit(cta.shared + (d.chunk(row, half) - kSharedWindow), row, half);
}

void check_operand(Fiber* f, const Descriptor& d, u32 rows, const char* operand) {
    const Cta& cta = *f->cta;
    u16 field = 0;
    for (u32 row = 0; row < rows; row += 8) {
        if (d.start < kSharedWindow) fail(f, FaultKind::OutOfBounds, "wgmma descriptor points below shared memory");
        const u32 line = (d.start & ~127u) + row / 8 * d.stride;
        const u32 offset = shared_offset(f, cta.shared + (line - kSharedWindow), 1024, operand);
        const u16 here = cta.grid->field_of[offset / 16];
        if (row != 0 && here != field)
            fail(f, FaultKind::OutOfBounds,
                 std::string(operand) + " crosses from one field of shared memory to another");
        field = here;
    }
}

// One warp's view of the operands: 16 rows of A, all of B.
void check_order(Fiber* f, const Warp& warp, const Descriptor& a, const Descriptor& b, u32 n) {
    const u32 first_row = warp.index % 4 * 16;
    const Fiber* last = nullptr;
    for (Fiber* lane : warp.lanes) {
        if (last && lane->view == last->view && !lane->dirty) continue;
        last = lane;
        for_chunks(*f->cta, a, kRowsOfA, [&](const u8* p, u32 row, u32) {
            if (row / 16 * 16 == first_row) race_tensor_read(lane, p, 16);
        });
        for_chunks(*f->cta, b, n, [&](const u8* p, u32, u32) { race_tensor_read(lane, p, 16); });
    }
}

void mark_reads(Cta& cta, const Descriptor& d, u32 rows, i32 in_flight, u32 first_warp, bool by_rows) {
    for_chunks(cta, d, rows, [&](const u8* p, u32 row, u32) {
        TensorReads& reads = cta.tensor_reads[(p - cta.shared) / 16];
        reads.in_flight = u32(i32(reads.in_flight) + in_flight);
        if (in_flight > 0) return;
        for (u32 w = 0; w < 4; ++w)
            if (!by_rows || row / 16 == w) reads.last[first_warp + w] = cta.warps[first_warp + w].time;
    });
}

// The accumulator whose registers these are: one in flight, or a new one.
u32 find_accumulator(Fiber* f, Warpgroup& wg, u32 n, bool accumulate) {
    for (u32 i = 0; i < wg.accumulators.size(); ++i) {
        Accumulator& acc = wg.accumulators[i];
        if (!acc.live || acc.d[0] != wg.d[0]) continue;
        if (acc.n != n) fail(f, FaultKind::Protocol, "wgmmas of different shapes on accumulators in flight");
        return i;
    }
    if (wg.fence_step <= wg.retire_step)
        fail(f, FaultKind::Protocol, "wgmma without a wgmma_fence since the thread could last touch the accumulators");
    u32 index = 0;
    while (index < wg.accumulators.size() && wg.accumulators[index].live) ++index;
    if (index == wg.accumulators.size()) wg.accumulators.emplace_back();
    Accumulator& acc = wg.accumulators[index];
    std::memcpy(acc.d, wg.d, sizeof(acc.d));
    acc.n = n;
    acc.live = true;
    acc.pending = 0;
    acc.values.assign(kRowsOfA * n, 0.0f);
    for (u32 t = 0; t < kWarpgroupSize; ++t) {
        const u32 row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
        for (u32 i = 0; i < n / 2; ++i) {
            if (accumulate) acc.values[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + column + i % 2] = acc.d[t][i];
            acc.d[t][i] = poison();
        }
    }
    return index;
}

void write_back(Fiber* f, Accumulator& acc) {
    for (u32 t = 0; t < kWarpgroupSize; ++t) {
        const u32 row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
        for (u32 i = 0; i < acc.n / 2; ++i) {
            u32 now;
            std::memcpy(&now, &acc.d[t][i], 4);
            if (now != kPoison)
                fail(f, FaultKind::Protocol, "accumulator registers were written while their wgmma was in flight");
            acc.d[t][i] = acc.values[(row + i / 2 % 2 * 8) * acc.n + i / 4 * 8 + column + i % 2];
        }
    }
    acc.live = false;
}

void execute(Fiber* f, Warpgroup& wg, const WgmmaInstruction& instruction) {
    Cta& cta = *f->cta;
    Accumulator& acc = wg.accumulators[instruction.accumulator];
    const Descriptor a = decode_descriptor(f, instruction.desc_a, "A"),
                     b = decode_descriptor(f, instruction.desc_b, "B");
    u8 bytes_a[kRowsOfA * kRowBytes], bytes_b[256 * kRowBytes];
    for_chunks(cta, a, kRowsOfA,
               [&](const u8* p, u32 row, u32 half) { std::memcpy(bytes_a + row * kRowBytes + half * 16, p, 16); });
    for_chunks(cta, b, acc.n,
               [&](const u8* p, u32 row, u32 half) { std::memcpy(bytes_b + row * kRowBytes + half * 16, p, 16); });
    fp8_mma(acc.values.data(), acc.n, bytes_a, bytes_b, instruction.accumulate);
    if (f->world->weak_memory) {
        const u32 first_warp = f->warp->index / 4 * 4;
        mark_reads(cta, a, kRowsOfA, -1, first_warp, true);
        mark_reads(cta, b, acc.n, -1, first_warp, false);
    }
    --acc.pending;
}

void issue(Fiber* f, u32 n, bool accumulate) {
    Cta& cta = *f->cta;
    Warpgroup& wg = warpgroup_of(f);
    const Descriptor a = decode_descriptor(f, wg.desc_a, "A"), b = decode_descriptor(f, wg.desc_b, "B");
    check_operand(f, a, kRowsOfA, "wgmma operand A");
    check_operand(f, b, n, "wgmma operand B");
    if (f->world->weak_memory) {
        const WarpRange warps = warpgroup_warps(f);
        for (u32 w = 0; w < 4; ++w) check_order(f, warps.first[w], a, b, n);
        mark_reads(cta, a, kRowsOfA, 1, 0, true);
        mark_reads(cta, b, n, 1, 0, false);
    }
    const u32 index = find_accumulator(f, wg, n, accumulate);
    ++wg.accumulators[index].pending;
    wg.instructions.push_back({index, wg.open_group, wg.desc_a, wg.desc_b, accumulate});
    ++cta.grid->counts.wgmma;
    cta.grid->counts.macs += u64(kRowsOfA) * n * kRowBytes;
}

void retire(Fiber* f, Warpgroup& wg, u32 pending) {
    u32 done = 0;
    while (done < wg.instructions.size() && wg.instructions[done].group + pending < wg.open_group)
        execute(f, wg, wg.instructions[done++]);
    wg.instructions.erase(wg.instructions.begin(), wg.instructions.begin() + done);
    for (Accumulator& acc : wg.accumulators)
        if (acc.live && acc.pending == 0) write_back(f, acc);
    if (done != 0) wg.retire_step = f->world->step;
}

}  // namespace

void complete_wgmma_collective(Fiber* f, Collective op, u32 argument) {
    Warpgroup& wg = warpgroup_of(f);
    switch (op) {
        case Collective::WgmmaFence: wg.fence_step = f->world->step; break;
        case Collective::WgmmaCommit: ++wg.open_group; break;
        case Collective::WgmmaWait: retire(f, wg, argument); break;
        default: break;
    }
}

void api_wgmma(ThreadHead* t, float* d, u32 n, u64 desc_a, u64 desc_b, bool accumulate) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (f->cta->fibers.size() % kWarpgroupSize != 0) fail(f, FaultKind::Protocol, "wgmma needs whole warpgroups");
    Warpgroup& wg = warpgroup_of(f);
    wg.d[f->thread_idx % kWarpgroupSize] = d;
    if (wg.meeting.count == 0) {
        wg.desc_a = desc_a;
        wg.desc_b = desc_b;
    } else if (wg.desc_a != desc_a || wg.desc_b != desc_b) {
        fail(f, FaultKind::Protocol, "divergence: the threads of a warpgroup bring different descriptors to wgmma");
    }
    if (!arrive(f, wg.meeting, Collective::Wgmma, n, accumulate, kWarpgroupSize, true)) {
        f->world->block(f, Wait::Collective);
        return;
    }
    issue(f, n, accumulate);
    wake_others(f, warpgroup_warps(f));
}

}  // namespace deep_moe::emu
