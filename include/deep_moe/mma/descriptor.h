// Shared-memory matrix descriptors of wgmma (PTX ISA, "Matrix-descriptor"): K-major operand, rows of 128 bytes with the
// 128-byte swizzle, 8-row groups 1024 bytes apart.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe {

constexpr u32 kSwizzleAtomRows = 8;
constexpr u32 kSwizzleAtomBytes = kSwizzleAtomRows * 128;

// `address`: shared-memory address of the operand's first row, 1024-byte aligned.
DM_HOST_DEVICE constexpr u64 swizzle128_descriptor(u32 address) {
    constexpr u64 kLeadingOffset = 1;  // not used by swizzled K-major layouts
    constexpr u64 kStrideOffset = kSwizzleAtomBytes >> 4;
    constexpr u64 kSwizzle128 = 1;
    return u64((address & 0x3ffff) >> 4) | kLeadingOffset << 16 | kStrideOffset << 32 | kSwizzle128 << 62;
}

// Moves along K inside the swizzle atom: the hardware applies the XOR to the final address.
DM_HOST_DEVICE constexpr u64 advance_descriptor(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// The operand `index` strides further on, as one addition to the low word: shared memory is too small for a carry.
DM_HOST_DEVICE constexpr u64 strided_descriptor(u64 descriptor, u32 index, u32 stride) {
    return (descriptor >> 32 << 32) | (u32(descriptor) + index * (stride >> 4));
}

}  // namespace deep_moe
