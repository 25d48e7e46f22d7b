// What a thread knows of the others: vector clocks, the base of the race detector.
//
// Each warp is an agent with a time of its own that advances at every release, fence and warp barrier of any lane. An
// access is stamped (agent, lane, time). A view says for every agent "all lanes up to `all`, and the lanes in `mask`
// up to `mask_time`". Merging two masks of different times keeps the later one, which can hide a race of one lane but
// never invents one. Each entry exists three times: accesses that are ordered (generic), and those of global and
// those of shared memory that are also visible to the async proxy (there was a proxy fence on the way). For every
// mbarrier a view has the last completed phase it has seen: that orders everything which completed on the barrier.
//
// Views are immutable once shared; the lanes of a warp mostly share one.
#pragma once

#include <vector>

#include "deep_moe/base/common.h"

namespace deep_moe::emu {

struct Entry {
    u32 all, mask_time, mask;

    bool knows(u32 lane, u32 time) const { return time <= all || ((mask >> lane & 1) && time <= mask_time); }
};

enum class Proxy : u32 { Generic, AsyncGlobal, AsyncShared };
constexpr u32 kProxies = 3;
constexpr Proxy kAsyncProxies[] = {Proxy::AsyncGlobal, Proxy::AsyncShared};

class View {
public:
    static View* create(u32 agents, u32 barriers);                   // knows nothing; one reference
    static View* copy(const View& other, u32 agents, u32 barriers);  // at least that large
    void acquire() { ++refs_; }
    void release() {
        if (--refs_ == 0) destroy();
    }
    bool shared() const { return refs_ > 1; }

    Entry entry(Proxy proxy, u32 agent) const {
        if (agent >= agents_) return {0, 0, 0};
        const u32* e = words(proxy) + agent;
        return {e[0], e[agents_], e[2 * agents_]};
    }
    u32 phase(u32 barrier) const { return barrier < barriers_ ? phases()[barrier] : 0; }

    // The following change the view: only while nobody else holds it. The view must be large enough.
    void join(const View& other);
    void learn_all(Proxy proxy, u32 agent, u32 time);
    void learn_lanes(Proxy proxy, u32 agent, u32 lanes, u32 time);
    void learn_phase(u32 barrier, u32 phase);
    void fence_async(Proxy proxy);  // what is ordered becomes visible to this async proxy
    void forget_async();            // nothing is visible to the async proxy

    u32 agents() const { return agents_; }
    u32 barriers() const { return barriers_; }
    bool covers(const View& other) const;  // joining `other` would change nothing

private:
    View(u32 agents, u32 barriers) : refs_(1), agents_(agents), barriers_(barriers) {}
    void destroy();
    u32* words(Proxy proxy) { return data_ + u32(proxy) * 3 * agents_; }
    const u32* words(Proxy proxy) const { return data_ + u32(proxy) * 3 * agents_; }
    u32* phases() { return data_ + kProxies * 3 * agents_; }
    const u32* phases() const { return data_ + kProxies * 3 * agents_; }

    u32 refs_, agents_, barriers_, pad_ = 0;
    u32 data_[];  // of each proxy {all, mask_time, mask}, each [agents]; phases [barriers]
};

// Reference to a view, or to nothing (which knows nothing).
class ViewRef {
public:
    ViewRef() = default;
    explicit ViewRef(View* owned) : view_(owned) {}
    ViewRef(const ViewRef& o) : view_(o.view_) {
        if (view_) view_->acquire();
    }
    ViewRef(ViewRef&& o) noexcept : view_(o.view_) { o.view_ = nullptr; }
    ViewRef& operator=(ViewRef o) noexcept {
        View* mine = view_;
        view_ = o.view_;
        o.view_ = mine;
        return *this;
    }
    ~ViewRef() {
        if (view_) view_->release();
    }
    View* get() const { return view_; }
    View* operator->() const { return view_; }
    explicit operator bool() const { return view_ != nullptr; }
    bool operator==(const ViewRef& o) const { return view_ == o.view_; }

private:
    View* view_ = nullptr;
};

// Sizes of new views; they only grow.
struct ViewSizes {
    u32 agents = 0, barriers = 0;

    ViewRef create() const { return ViewRef(View::create(agents, barriers)); }
    ViewRef copy(const ViewRef& v) const { return v ? ViewRef(View::copy(*v.get(), agents, barriers)) : create(); }
    // The view itself when nobody else holds it and it is large enough; otherwise v becomes such a copy.
    View& writable(ViewRef& v) const {
        if (!v || v->shared() || v->agents() < agents || v->barriers() < barriers) v = copy(v);
        return *v.get();
    }
    ViewRef join(const ViewRef& a, const ViewRef& b) const;  // shares when one of them covers the other
    // Adds `b` to `a`, copying `a` first when others hold it.
    void join_into(ViewRef& a, const ViewRef& b) const;
};

}  // namespace deep_moe::emu
