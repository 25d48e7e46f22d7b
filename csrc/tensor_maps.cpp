// TensorMapSpec -> CUtensorMap.
#include "driver.h"

namespace deep_moe::cuda {
namespace {

// CUtensorMapDataType, ...Interleave, ...Swizzle, ...L2promotion, ...FloatOOBfill
constexpr int kUint8 = 0;
constexpr int kInterleaveNone = 0;
constexpr int kSwizzle128B = 3;
constexpr int kL2Promotion256B = 3;
constexpr int kFillZeros = 0;

}  // namespace

void encode_tensor_map(const TensorMapSpec& spec, u64 address, TensorMap& map) {
    const Driver& driver = Driver::get();
    const u32 element_strides[3] = {1, 1, 1};
    const Result result = driver.tensor_map_encode_tiled(&map, kUint8, spec.rank, reinterpret_cast<void*>(address),
                                                         spec.dims, spec.strides, spec.box, element_strides,
                                                         kInterleaveNone, kSwizzle128B, kL2Promotion256B, kFillZeros);
    driver.check(result, (std::string("cuTensorMapEncodeTiled(") + spec.name + ")").c_str());
}

}  // namespace deep_moe::cuda
