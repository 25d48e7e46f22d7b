#include "context.h"

#if defined(__x86_64__)
asm(R"(
    .text
    .globl deep_moe_emu_switch
    .hidden deep_moe_emu_switch
    .type deep_moe_emu_switch, @function
deep_moe_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size deep_moe_emu_switch, .-deep_moe_emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl deep_moe_emu_switch
    .hidden deep_moe_emu_switch
    .type deep_moe_emu_switch, @function
deep_moe_emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size deep_moe_emu_switch, .-deep_moe_emu_switch
)");
#else
#error "the emulator switches stacks by hand: it needs x86-64 or AArch64"
#endif

namespace deep_moe::emu {

void* new_context(u8* top, void (*entry)()) {
    u64* sp = reinterpret_cast<u64*>(top);
#if defined(__x86_64__)
    *--sp = 0;                             // where the caller's return address would be: ends a stack trace
    *--sp = reinterpret_cast<u64>(entry);  // popped by `ret`; then sp is 8 mod 16, as after a call
    for (u32 i = 0; i < 6; ++i) *--sp = 0;
#else
    sp -= 20;
    for (u32 i = 0; i < 20; ++i) sp[i] = 0;
    sp[11] = reinterpret_cast<u64>(entry);  // x30
#endif
    return sp;
}

}  // namespace deep_moe::emu
