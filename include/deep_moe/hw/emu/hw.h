// The emulator's side of hw/: every function calls the emulator (csrc/emu) through the table of the running thread.
// Each call is a point where the seeded scheduler may switch to another thread.
#pragma once

#include "deep_moe/hw/emu/api.h"
#include "deep_moe/hw/emu/async.h"
#include "deep_moe/hw/emu/cluster.h"
#include "deep_moe/hw/emu/common.h"
#include "deep_moe/hw/emu/memory.h"
#include "deep_moe/hw/emu/sm90.h"
