// Switching between stacks without a system call.
#pragma once

#include "deep_moe/base/common.h"

namespace deep_moe::emu {

// Saves the callee-saved registers and the stack pointer in *save, and continues where `load` was saved.
extern "C" void deep_moe_emu_switch(void** save, void* load);

// A stack pointer that starts `entry` (which must never return) when switched to; `top` is 16-byte aligned.
void* new_context(u8* top, void (*entry)());

}  // namespace deep_moe::emu
