// Single faults and single facts. Memory of a rank: `count` bytes.
#include "common.h"

enum Case {
    kCollectives,
    kStoreBeyond,
    kLoadUnknown,
    kWriteReadOnly,
    kSharedCross,
    kSharedBeyond,
    kMisaligned,
    kBarrierAsData,
    kBarrierDeadlock,
    kPollDeadlock,
    kLaneRace,
    kLaneRaceFixed,
    kExitEarly,
    kTimeout,
    kAtomics,
    kRegisters,
    kConvert,
    kBlockDeadlock,
    kUnorderedInit
};

DM_DEVICE void collectives(const Args* a, u32 t) {
    u32* out = reinterpret_cast<u32*>(a->out) + t * 9;
    const u32 value = t * 3 + 1;
    hw::store(out + 0, hw::shfl(value, 5));
    hw::store(out + 1, hw::shfl_xor(value, 2));
    hw::store(out + 2, hw::shfl_up(value, 4));
    hw::store(out + 3, hw::ballot(t % 3 == 0));
    hw::store(out + 4, u32(hw::all_lanes(t < 40)));
    hw::store(out + 5, hw::float_bits(hw::shfl_xor(float(t) * 0.5f, 1)));
    hw::store(out + 6, hw::byte_permute(0x33221100u, 0x77665544u, 0x7351u));
    hw::store(out + 7, hw::popcount(value) << 8 | hw::lowest_bit(value));
    hw::store(out + 8, hw::min_of_lanes(value ^ 21) << 1 | u32(hw::elect_one()));
}

DM_DEVICE void convert(const Args* a, u32 t) {
    const float* in = reinterpret_cast<const float*>(a->weights);
    for (u32 i = t; i < a->count; i += 64) {
        const float x = hw::load(in + i);
        hw::store(reinterpret_cast<u16*>(a->out) + i, u16(hw::pack_e4m3x2(x, x)));
        hw::store(reinterpret_cast<u16*>(a->out) + a->count + i, u16(hw::pack_bf16x2(x, 0.0f)));
    }
}

extern "C" void small(const Args* a) {
    const u32 t = hw::thread_idx();
    u8* smem = hw::shared_memory();
    u64* barriers = reinterpret_cast<u64*>(smem + 256);
    u32* words = reinterpret_cast<u32*>(a->peers[a->rank]);
    switch (a->plant) {
        case kCollectives:
            if (hw::block_idx() == 0) collectives(a, t);
            break;
        case kConvert:
            if (hw::block_idx() == 0) convert(a, t);
            break;
        case kStoreBeyond:
            if (t == 3) hw::store(words + a->count / 4, 1u);
            break;
        case kLoadUnknown:
            if (t == 3) hw::load(words + a->count);
            break;
        case kWriteReadOnly:
            if (t == 3) hw::store(const_cast<u32*>(reinterpret_cast<const u32*>(a->weights)), 1u);
            break;
        case kSharedCross:
            if (t == 3) hw::load_shared(reinterpret_cast<Vec16*>(smem + 320));
            break;
        case kSharedBeyond:
            if (t == 3) hw::load_shared(smem + 512);
            break;
        case kMisaligned:
            if (t == 3) hw::store_shared(reinterpret_cast<u32*>(smem + 2), 1u);
            break;
        case kBarrierAsData:
            if (t == 0) hw::mbarrier_init(barriers, 1);
            hw::sync_block();
            if (t == 1) hw::load_shared(barriers);
            break;
        case kBarrierDeadlock:
            if (t == 0) {
                hw::mbarrier_init(&barriers[0], 1);
                hw::mbarrier_init(&barriers[1], 2);
            }
            hw::sync_block();
            if (t == 0) hw::mbarrier_arrive(&barriers[1]);
            wait_barrier(&barriers[1], 0);
            break;
        case kUnorderedInit:
            if (t == 0) hw::mbarrier_init(&barriers[0], 64);
            if (t >= 32 && t < 64) hw::mbarrier_arrive(&barriers[0]);
            break;
        case kPollDeadlock:
            if (t == 0)
                while (hw::load_acquire<hw::Scope::Sys>(words) != 5) hw::poll_pause(5, 12, words);
            break;
        case kBlockDeadlock:
            if (t >= 32)
                hw::sync_block();
            else
                while (hw::load_acquire<hw::Scope::Sys>(words) != 5) hw::poll_pause(5, 12, words);
            break;
        case kLaneRace:
        case kLaneRaceFixed:
            if (t < 32 && hw::block_idx() == 0) {
                hw::store_shared(reinterpret_cast<u32*>(smem) + t, t * 7);
                if (a->plant == kLaneRaceFixed) hw::sync_warp();
                hw::store(reinterpret_cast<u32*>(a->out) + t,
                          hw::load_shared(reinterpret_cast<u32*>(smem) + (t + 1) % 32));
            }
            break;
        case kExitEarly:
            if (t == 7) hw::exit_thread();
            hw::sync_warp();
            break;
        case kTimeout:
            if (t == 0 && hw::block_idx() == 0) {
                const u64 start = hw::timer_ns();
                while (hw::load_acquire<hw::Scope::Sys>(words) != 5) {
                    if (hw::timer_ns() - start > 10000000000ull) break;
                    hw::poll_pause(6, 1, words);
                }
                hw::store(reinterpret_cast<u32*>(a->out), 99u);
            }
            break;
        case kAtomics: {
            const u32 old = hw::atomic_add_relaxed_gpu(words, 1);
            if (old == 2 * 64 - 1) hw::store(reinterpret_cast<u32*>(a->out), 1u);
            if (t < 32) hw::atomic_add_shared(reinterpret_cast<u32*>(smem), 0);
            hw::atomic_cas_relaxed_sys(reinterpret_cast<u64*>(words) + 1, 0x7f7f7f7f7f7f7f7full, u64(hw::block_idx()));
            hw::atomic_add_acq_rel<hw::Scope::Gpu>(words + 4, 2);
            break;
        }
        default: break;
    }
}
