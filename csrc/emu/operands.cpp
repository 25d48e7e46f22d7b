#include "operands.h"

#include <cstring>

#include "memory.h"

namespace deep_moe::emu {

namespace {

constexpr u32 kSharedWindow = 1024;

std::string operand_name(bool is_a) { return is_a ? "A" : "B"; }

SharedOperand decode(Fiber* f, u64 bits, u32 rows, bool is_a) {
    const u32 start = u32(bits & 0x3fff) << 4, stride = u32(bits >> 32 & 0x3fff) << 4;
    const u32 base_offset = u32(bits >> 49 & 7), mode = u32(bits >> 62);
    auto check = [&](bool ok, const std::string& rule) {
        if (!ok) fail(f, FaultKind::Protocol, "wgmma descriptor of " + operand_name(is_a) + ": " + rule);
    };
    check(mode == 1, "the emulator knows the 128-byte swizzle (mode 1), not mode " + std::to_string(mode));
    check(base_offset == 0 && (start & 0x380) == 0, "the start must lie in the first row of a 1024-byte aligned group");
    check(stride % 1024 == 0 && stride != 0, "the stride of 8-row groups must be a multiple of 1024 bytes");
    check((start & 0x7f) + kOperandBytes <= 128, "the operand leaves its 128-byte rows");
    return {start, stride, rows, is_a};
}

// Calls visit(pointer, row, half) for the 16-byte chunks of an operand.
template <typename Visit>
void for_chunks(const Cta& cta, const SharedOperand& o, const Visit& visit) {
    for (u32 row = 0; row < o.rows; ++row)
        for (u32 half = 0; half < 2; ++half) visit(cta.shared + (o.chunk(row, half) - kSharedWindow), row, half);
}

void check_bounds(Fiber* f, const SharedOperand& o) {
    const Cta& cta = *f->cta;
    const std::string name = "wgmma operand " + operand_name(o.is_a);
    u16 field = 0;
    for (u32 row = 0; row < o.rows; row += 8) {
        if (o.start < kSharedWindow) fail(f, FaultKind::OutOfBounds, "wgmma descriptor points below shared memory");
        const u32 line = (o.start & ~127u) + row / 8 * o.stride;
        const u32 offset = shared_offset(f, cta.shared + (line - kSharedWindow), 1024, name.c_str());
        const u16 here = cta.grid->field_of[offset / 16];
        if (row != 0 && here != field)
            fail(f, FaultKind::OutOfBounds, name + " crosses from one field of shared memory to another");
        field = here;
    }
}

// As the lanes of one warp know the world: 16 rows of A, all of B.
void check_order(Fiber* f, const Warp& warp, const SharedOperand& o) {
    const u32 first_row = warp.index % 4 * 16;
    const Fiber* last = nullptr;
    for (Fiber* lane : warp.lanes) {
        if (last && lane->view == last->view && !lane->shared_writes.dirty) continue;
        last = lane;
        for_chunks(*f->cta, o, [&](const u8* p, u32 row, u32) {
            if (!o.is_a || row / 16 * 16 == first_row) race_tensor_read(lane, p, 16);
        });
    }
}

void remember(Fragment& fragment) {
    for (u32 t = 0; t < kWarpgroupSize; ++t) std::memcpy(fragment.values[t], fragment.a[t], sizeof(fragment.values[t]));
}

void check_unchanged(Fiber* f, const Fragment& fragment) {
    Fiber* const* threads = &f->cta->fibers[f->thread_idx / kWarpgroupSize * kWarpgroupSize];
    for (u32 t = 0; t < kWarpgroupSize; ++t) {
        if (std::memcmp(fragment.values[t], fragment.a[t], sizeof(fragment.values[t])) == 0) continue;
        if (fragment.in_flight == 0)
            fail(threads[t], FaultKind::Protocol, "wgmma without a wgmma_fence since registers of A were written");
        fail(threads[t], FaultKind::Protocol,
             "registers of A were written while a wgmma in flight reads them (no wgmma_wait yet), or their array went "
             "out of scope");
    }
}

}  // namespace

SharedOperand operand_a(Fiber* f, u64 descriptor) { return decode(f, descriptor, kRowsOfA, true); }
SharedOperand operand_b(Fiber* f, u64 descriptor, u32 n) { return decode(f, descriptor, n, false); }

void begin_read(Fiber* f, const SharedOperand& o) {
    check_bounds(f, o);
    if (!f->world->weak_memory) return;
    Warp* first = &f->cta->warps[f->warp->index / 4 * 4];
    for (u32 w = 0; w < 4; ++w) check_order(f, first[w], o);
    for_chunks(*f->cta, o, [&](const u8* p, u32, u32) { ++f->cta->tensor_reads[(p - f->cta->shared) / 16].in_flight; });
}

void end_read(Fiber* f, const SharedOperand& o, u8* rows) {
    Cta& cta = *f->cta;
    const u32 first = f->warp->index / 4 * 4;
    for_chunks(cta, o, [&](const u8* p, u32 row, u32 half) {
        std::memcpy(rows + row * kOperandBytes + half * 16, p, 16);
        if (!f->world->weak_memory) return;
        TensorReads& reads = cta.tensor_reads[(p - cta.shared) / 16];
        --reads.in_flight;
        for (u32 w = first; w < first + 4; ++w)
            if (!o.is_a || row / 16 == w - first) reads.last[w] = cta.warps[w].time;
    });
}

u32 begin_read_fragment(Fiber* f, Warpgroup& wg) {
    for (u32 i = 0; i < wg.fragments.size(); ++i) {
        Fragment& known = wg.fragments[i];
        if (std::memcmp(known.a, wg.a, sizeof(known.a)) != 0) continue;
        check_unchanged(f, known);
        ++known.in_flight;
        return i;
    }
    Fragment& fragment = wg.fragments.emplace_back();
    std::memcpy(fragment.a, wg.a, sizeof(fragment.a));
    remember(fragment);
    fragment.in_flight = 1;
    return u32(wg.fragments.size() - 1);
}

void end_read_fragment(Fiber* f, Warpgroup& wg, u32 index, u8* rows) {
    Fragment& fragment = wg.fragments[index];
    check_unchanged(f, fragment);
    --fragment.in_flight;
    for (u32 t = 0; t < kWarpgroupSize; ++t)
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, k = t % 4 * 4 + i / 2 * 16;
            std::memcpy(rows + row * kOperandBytes + k, &fragment.values[t][i], 4);
        }
}

void fence_fragments(Fiber* f, Warpgroup& wg) {
    for (Fragment& fragment : wg.fragments)
        if (fragment.in_flight == 0)
            remember(fragment);
        else
            check_unchanged(f, fragment);
}

}  // namespace deep_moe::emu
