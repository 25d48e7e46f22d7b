// What a tensor-core instruction multiplies: rows of 32 bytes, in shared memory behind a descriptor or, of A, in the
// registers of a warpgroup. It may read them at any time between its issue and the wgmma_wait that retires it.
#pragma once

#include "race.h"

namespace deep_moe::emu {

constexpr u32 kOperandBytes = 32;  // of a row: K of one instruction
constexpr u32 kRowsOfA = 64;

// A K-major operand in shared memory with the 128-byte swizzle.
struct SharedOperand {
    u32 start, stride;  // shared address; bytes between groups of 8 rows
    u32 rows;
    bool is_a;  // each warp reads 16 of the rows; all of B

    // Shared address of 16 bytes of a row. The swizzle acts on address bits.
    u32 chunk(u32 row, u32 half) const {
        const u32 address = start + row / 8 * stride + row % 8 * 128 + half * 16;
        return address ^ (address >> 3 & 0x70);
    }
};

SharedOperand operand_a(Fiber* f, u64 descriptor);
SharedOperand operand_b(Fiber* f, u64 descriptor, u32 n);
// Bounds and order, when an instruction is issued; until end_read nothing may write there.
void begin_read(Fiber* f, const SharedOperand& operand);
void end_read(Fiber* f, const SharedOperand& operand, u8* rows);

// The registers that the threads of a warpgroup have brought as A (wg.a), as an index into its fragments.
u32 begin_read_fragment(Fiber* f, Warpgroup& wg);
void end_read_fragment(Fiber* f, Warpgroup& wg, u32 index, u8* rows);
// A wgmma_fence: what registers hold now, later wgmmas may read.
void fence_fragments(Fiber* f, Warpgroup& wg);

}  // namespace deep_moe::emu
