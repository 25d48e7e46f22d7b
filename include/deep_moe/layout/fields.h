// How a region of memory (symmetric buffer, shared memory) is described: a list of named, typed fields.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe {

enum class Dtype : u32 { U8, U16, E4m3, Bf16, I32, U32, U64, F32 };

constexpr u32 dtype_bytes(Dtype t) {
    switch (t) {
        case Dtype::U8:
        case Dtype::E4m3: return 1;
        case Dtype::U16:
        case Dtype::Bf16: return 2;
        case Dtype::U64: return 8;
        default: return 4;
    }
}

struct FieldSpec {
    const char* name;
    Dtype dtype;
    u64 shape[3];   // row-major; trailing dimensions of 1 where fewer are needed
    u32 alignment;  // bytes

    constexpr u64 bytes() const { return shape[0] * shape[1] * shape[2] * dtype_bytes(dtype); }
};

// Offset of field `index`, or the total size for index == count. Spec: (index) -> FieldSpec.
template <typename Spec>
constexpr u64 field_offset(const Spec& spec, u32 index, u32 count, u32 total_alignment) {
    u64 offset = 0;
    for (u32 i = 0; i < count; ++i) {
        const FieldSpec field = spec(i);
        offset = align_up<u64>(offset, field.alignment);
        if (i == index) return offset;
        offset += field.bytes();
    }
    return align_up<u64>(offset, total_alignment);
}

// FNV-1a over whatever describes a layout.
struct LayoutHash {
    u64 value = 0xcbf29ce484222325ull;

    constexpr void add(u64 word) {
        for (u32 i = 0; i < 8; ++i) {
            value ^= (word >> (8 * i)) & 0xff;
            value *= 0x100000001b3ull;
        }
    }
    constexpr void add(const char* text) {
        for (; *text; ++text) add(u64(u8(*text)));
    }
    constexpr void add(const FieldSpec& field, u64 offset) {
        add(field.name);
        add(u64(field.dtype));
        for (u64 extent : field.shape) add(extent);
        add(offset);
    }
};

}  // namespace deep_moe
