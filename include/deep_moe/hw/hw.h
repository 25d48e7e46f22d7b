// All access to hardware. The same names exist twice: hw/cuda (the only inline PTX of the project) and hw/emu (the CPU
// emulator). A function here is one PTX instruction or one fixed idiom: no K loops, layouts or schedules.
//
// Pointers are generic C++ pointers; functions named *_shared take pointers into this CTA's shared memory.
// Plain dereferences of global or shared memory are not allowed outside hw/: the emulator could not see them.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe::hw {
enum class Scope { Cta, Gpu, Sys };
}

#if defined(DM_EMULATOR)
#include "deep_moe/hw/emu/hw.h"
#else
#include "deep_moe/hw/cuda/async.cuh"
#include "deep_moe/hw/cuda/cluster.cuh"
#include "deep_moe/hw/cuda/common.cuh"
#include "deep_moe/hw/cuda/memory.cuh"
#include "deep_moe/hw/cuda/sm90.cuh"
#endif
