// Tensor maps of the emulator, with the rules that cuTensorMapEncodeTiled checks.
#include <cstring>

#include "async.h"

namespace deep_moe::emu {

namespace {
constexpr u32 kMagic = 0x50414d54;  // "TMAP"
}

TensorMap encode_tensor_map(const TensorMapSpec& spec, const void* base) {
    auto check = [&](bool ok, const char* rule) {
        if (!ok) throw Fault(FaultKind::Protocol, std::string("tensor map ") + spec.name + ": " + rule);
    };
    check(spec.rank == 2 || spec.rank == 3, "rank must be 2 or 3");
    check(u64(base) % 16 == 0, "the base must be 16-byte aligned");
    check(spec.box[0] <= 128, "a box row is wider than the 128-byte swizzle");
    for (u32 i = 0; i < spec.rank; ++i) {
        check(spec.dims[i] >= 1 && spec.dims[i] <= (1ull << 32), "dimensions must be in 1..2^32");
        check(spec.box[i] >= 1 && spec.box[i] <= 256, "box dimensions must be in 1..256");
        if (i > 0) check(spec.strides[i - 1] % 16 == 0 && spec.strides[i - 1] < (1ull << 40), "bad stride");
    }
    check(spec.box[0] % 16 == 0, "a box row must be a multiple of 16 bytes");
    TensorMapImage image{};
    image.magic = kMagic;
    image.rank = spec.rank;
    image.base = static_cast<u8*>(const_cast<void*>(base));
    std::memcpy(image.dims, spec.dims, sizeof(image.dims));
    std::memcpy(image.strides, spec.strides, sizeof(image.strides));
    std::memcpy(image.box, spec.box, sizeof(image.box));
    std::strncpy(image.name, spec.name, sizeof(image.name) - 1);
    TensorMap map{};
    std::memcpy(&map, &image, sizeof(image));
    return map;
}

const TensorMapImage& decode_tensor_map(Fiber* f, const TensorMap* map, u32 rank) {
    if (u64(map) % 64 != 0) fail(f, FaultKind::Protocol, "tma_load: the tensor map is not 64-byte aligned");
    const TensorMapImage& image = *reinterpret_cast<const TensorMapImage*>(map);
    if (image.magic != kMagic) fail(f, FaultKind::Protocol, "tma_load: this is not a tensor map");
    if (image.rank != rank)
        fail(f, FaultKind::Protocol,
             "tma_load_" + std::to_string(rank) + "d with the " + std::to_string(image.rank) +
                 "-dimensional tensor map " + image.name);
    return image;
}

}  // namespace deep_moe::emu
