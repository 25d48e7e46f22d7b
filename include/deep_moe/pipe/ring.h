// Position in a ring of kDepth slots guarded by full/empty mbarriers.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe {

template <u32 kDepth>
struct RingPosition {
    u32 slot = 0;
    u32 phase = 0;

    // Parity to wait for on `full` (consumer) and on `empty` (producer; the first round passes at once).
    DM_DEVICE u32 full_parity() const { return phase; }
    DM_DEVICE u32 empty_parity() const { return phase ^ 1; }

    // Several slots at a time: kDepth and the first position are multiples of kSteps.
    template <u32 kSteps = 1>
    DM_DEVICE void advance() {
        static_assert(kDepth % kSteps == 0);
        if ((slot += kSteps) == kDepth) {
            slot = 0;
            phase ^= 1;
        }
    }
};

}  // namespace deep_moe
