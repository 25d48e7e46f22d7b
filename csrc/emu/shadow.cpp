#include "shadow.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace deep_moe::emu {

namespace {
u64 shadow_bytes(u64 bytes) { return align_up<u64>(ceil_div<u64>(bytes, kCellBytes) * sizeof(Cell), 4096); }
}  // namespace

Shadow::Shadow(const u8* base, u64 bytes) : base_(base), bytes_(bytes) {
    void* memory =
        mmap(nullptr, shadow_bytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    cells_ = static_cast<Cell*>(memory);
}

Shadow::~Shadow() {
    if (cells_) munmap(cells_, shadow_bytes(bytes_));
}

void Shadow::clear() { madvise(cells_, shadow_bytes(bytes_), MADV_DONTNEED); }

void Shadow::swap(Shadow& o) noexcept {
    std::swap(base_, o.base_);
    std::swap(bytes_, o.bytes_);
    std::swap(cells_, o.cells_);
}

}  // namespace deep_moe::emu
