// Warpgroup MMA: operands are read when the instruction is waited for, as late as hardware may; the accumulator
// registers hold NaNs until then.
#include <cstring>

#include "api_functions.h"
#include "collectives.h"
#include "operands.h"

namespace deep_moe::emu {

namespace {

constexpr u32 kPoison = 0x7fc0dead;  // a NaN

float poison() {
    float value;
    std::memcpy(&value, &kPoison, 4);
    return value;
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
    Accumulator& acc = wg.accumulators[instruction.accumulator];
    u8 a[kRowsOfA * kOperandBytes], b[256 * kOperandBytes];
    if (instruction.fragment != kNoFragment)
        end_read_fragment(f, wg, instruction.fragment, a);
    else
        end_read(f, operand_a(f, instruction.desc_a), a);
    end_read(f, operand_b(f, instruction.desc_b, acc.n), b);
    fp8_mma(acc.values.data(), acc.n, a, b, instruction.accumulate);
    --acc.pending;
}

void issue(Fiber* f, u32 n, bool accumulate) {
    Warpgroup& wg = warpgroup_of(f);
    u32 fragment = kNoFragment;
    if (wg.a[0])
        fragment = begin_read_fragment(f, wg);
    else
        begin_read(f, operand_a(f, wg.desc_a));
    begin_read(f, operand_b(f, wg.desc_b, n));
    const u32 index = find_accumulator(f, wg, n, accumulate);
    ++wg.accumulators[index].pending;
    wg.instructions.push_back({index, fragment, wg.open_group, wg.desc_a, wg.desc_b, accumulate});
    Counts& counts = f->cta->grid->counts;
    ++counts.wgmma;
    counts.macs += u64(kRowsOfA) * n * kOperandBytes;
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
        case Collective::WgmmaFence:
            fence_fragments(f, wg);
            wg.fence_step = f->world->step;
            break;
        case Collective::WgmmaCommit: ++wg.open_group; break;
        case Collective::WgmmaWait: retire(f, wg, argument); break;
        default: break;
    }
}

void api_wgmma(ThreadHead* t, const WgmmaOperands& o) {
    Fiber* f = static_cast<Fiber*>(t);
    f->world->enter(f);
    if (f->cta->fibers.size() % kWarpgroupSize != 0) fail(f, FaultKind::Protocol, "wgmma needs whole warpgroups");
    Warpgroup& wg = warpgroup_of(f);
    wg.d[f->thread_idx % kWarpgroupSize] = o.d;
    wg.a[f->thread_idx % kWarpgroupSize] = o.a;
    if (wg.meeting.count == 0) {
        wg.desc_a = o.desc_a;
        wg.desc_b = o.desc_b;
    } else if (wg.desc_a != o.desc_a || wg.desc_b != o.desc_b) {
        fail(f, FaultKind::Protocol, "divergence: the threads of a warpgroup bring different descriptors to wgmma");
    }
    const u32 form = u32(o.accumulate) << 1 | u32(o.a != nullptr);
    if (!arrive(f, wg.meeting, Collective::Wgmma, o.n, form, kWarpgroupSize, true)) {
        f->world->block(f, Wait::Collective);
        return;
    }
    issue(f, o.n, o.accumulate);
    wake_others(f, warpgroup_warps(f));
}

}  // namespace deep_moe::emu
