// Where an address lies, and whether an access may be there.
#pragma once

#include "race.h"

namespace deep_moe::emu {

// The region that holds [p, p + bytes); a fault otherwise, or when it is to be written and is read-only.
const Area& find_area(Fiber* f, const void* p, u64 bytes, bool write, const char* what);
// Offset of [p, p + bytes) in the shared memory of a CTA, inside one field and outside all barriers; a fault otherwise.
u32 shared_offset(Fiber* f, const Cta& cta, const void* p, u64 bytes, const char* what);
inline u32 shared_offset(Fiber* f, const void* p, u64 bytes, const char* what) {
    return shared_offset(f, *f->cta, p, bytes, what);
}
// Whether the field at this offset is exempt from race detection.
bool shared_is_racy(const Fiber& f, u32 offset);

}  // namespace deep_moe::emu
