#include "view.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "vector_clones.h"

namespace deep_moe::emu {

namespace {

// Entries of `b` into those of `a`; n entries each, arrays {all, mask_time, mask} with their own strides.
DM_VECTOR_CLONES void join_entries(u32* __restrict all_a, u32* __restrict time_a, u32* __restrict mask_a,
                                   const u32* __restrict all_b, const u32* __restrict time_b,
                                   const u32* __restrict mask_b, u32 n) {
    for (u32 i = 0; i < n; ++i) {
        const u32 all = all_a[i] > all_b[i] ? all_a[i] : all_b[i];
        const u32 ma = time_a[i] > all ? mask_a[i] : 0, mb = time_b[i] > all ? mask_b[i] : 0;
        const u32 ta = ma ? time_a[i] : 0, tb = mb ? time_b[i] : 0;
        const u32 time = ta > tb ? ta : tb, mask = ma | mb;
        const bool full = mask == ~0u;
        all_a[i] = full ? time : all;
        time_a[i] = full ? 0 : time;
        mask_a[i] = full ? 0 : mask;
    }
}

DM_VECTOR_CLONES void join_phases(u32* __restrict a, const u32* __restrict b, u32 n) {
    for (u32 i = 0; i < n; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
}

DM_VECTOR_CLONES bool covers_words(const u32* __restrict all_a, const u32* __restrict time_a,
                                   const u32* __restrict mask_a, const u32* __restrict all_b,
                                   const u32* __restrict time_b, const u32* __restrict mask_b, u32 n) {
    u32 missing = 0;
    for (u32 i = 0; i < n; ++i) {
        const u32 mb = time_b[i] > all_a[i] ? mask_b[i] : 0;
        const u32 seen = time_b[i] <= time_a[i] ? mask_a[i] : 0;
        missing |= u32(all_b[i] > all_a[i]) | (mb & ~seen);
    }
    return missing == 0;
}

u64 words_of(u32 agents, u32 barriers) { return u64(kProxies) * 3 * agents + barriers; }

}  // namespace

View* View::create(u32 agents, u32 barriers) {
    const u64 bytes = sizeof(View) + 4 * words_of(agents, barriers);
    void* memory = std::malloc(bytes);
    if (!memory) throw std::bad_alloc();
    View* view = new (memory) View(agents, barriers);
    std::memset(view->data_, 0, bytes - sizeof(View));
    return view;
}

View* View::copy(const View& other, u32 agents, u32 barriers) {
    if (other.agents_ == agents && other.barriers_ == barriers) {
        const u64 words = words_of(agents, barriers);
        void* memory = std::malloc(sizeof(View) + 4 * words);
        if (!memory) throw std::bad_alloc();
        View* view = new (memory) View(agents, barriers);
        std::memcpy(view->data_, other.data_, 4 * words);
        return view;
    }
    View* view = create(max_of(agents, other.agents_), max_of(barriers, other.barriers_));
    view->join(other);
    return view;
}

void View::destroy() { std::free(this); }

void View::join(const View& o) {
    const u32 n = min_of(agents_, o.agents_);
    for (Proxy proxy : {Proxy::Generic, Proxy::AsyncGlobal, Proxy::AsyncShared}) {
        u32* a = words(proxy);
        const u32* b = o.words(proxy);
        join_entries(a, a + agents_, a + 2 * agents_, b, b + o.agents_, b + 2 * o.agents_, n);
    }
    join_phases(phases(), o.phases(), min_of(barriers_, o.barriers_));
}

bool View::covers(const View& o) const {
    if (o.agents_ > agents_ || o.barriers_ > barriers_) return false;
    for (Proxy proxy : {Proxy::Generic, Proxy::AsyncGlobal, Proxy::AsyncShared}) {
        const u32* a = words(proxy);
        const u32* b = o.words(proxy);
        if (!covers_words(a, a + agents_, a + 2 * agents_, b, b + o.agents_, b + 2 * o.agents_, o.agents_))
            return false;
    }
    u32 missing = 0;
    for (u32 i = 0; i < o.barriers_; ++i) missing |= u32(o.phases()[i] > phases()[i]);
    return missing == 0;
}

void View::learn_all(Proxy proxy, u32 agent, u32 time) {
    u32* e = words(proxy) + agent;
    if (time > e[0]) e[0] = time;
    if (e[agents_] <= e[0]) e[agents_] = e[2 * agents_] = 0;
}

void View::learn_lanes(Proxy proxy, u32 agent, u32 lanes, u32 time) {
    u32* e = words(proxy) + agent;
    if (time <= e[0] || lanes == 0) return;
    e[agents_] = max_of(e[agents_], time);
    e[2 * agents_] |= lanes;
    if (e[2 * agents_] == ~0u) {
        e[0] = e[agents_];
        e[agents_] = e[2 * agents_] = 0;
    }
}

void View::learn_phase(u32 barrier, u32 phase) {
    if (phase > phases()[barrier]) phases()[barrier] = phase;
}

void View::fence_async(Proxy proxy) { std::memcpy(words(proxy), words(Proxy::Generic), 12ull * agents_); }
void View::forget_async() {
    for (Proxy proxy : kAsyncProxies) std::memset(words(proxy), 0, 12ull * agents_);
}

ViewRef ViewSizes::join(const ViewRef& a, const ViewRef& b) const {
    if (!b || a == b) return a;
    if (!a || b->covers(*a.get())) return b;
    if (a->covers(*b.get())) return a;
    ViewRef result = copy(a);
    result->join(*b.get());
    return result;
}

void ViewSizes::join_into(ViewRef& a, const ViewRef& b) const {
    if (!b || a == b) return;
    if (!a) {
        a = b;
        return;
    }
    if (a->covers(*b.get())) return;
    writable(a).join(*b.get());
}

}  // namespace deep_moe::emu
