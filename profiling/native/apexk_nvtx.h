// NVTX ranges from native threads: the domain, words and payloads of apexk/nvtx.py, without any NVIDIA header.
//
//     #include "apexk_nvtx.h"
//     { apexk_nvtx::Range range(apexk_nvtx::COPY_EXACT, layer, expert); ... launch the copy ... }
//
// Header only, C++17, Linux; link with -ldl where libc wants it. A tool is found as NVTX finds it: a library that is already in
// the process and exports InitializeInjectionNvtx2Preinject, else the one that NVTX_INJECTION64_PATH names. Without a tool a range
// is one load and a branch. The numbers and layouts below are NVTX 3's binary interface (nvtx3/nvtxDetail/nvtxTypes.h).
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace apexk_nvtx {

enum Kind { COPY_EXACT, COPY_SPEC, HOST_ROWS, HOST_FFN, GPU_RESIDENT, GPU_ARRIVED, COMBINE, KINDS };

inline constexpr int MOST_LAYERS = 256;  // layers beyond share the message of the last one
inline constexpr const char* NAMES[KINDS] = {"copy.exact", "copy.spec", "host.rows", "host.ffn", "gpu.resident", "gpu.arrived", "combine"};
inline constexpr std::uint32_t COLORS[KINDS] = {0xffffa500, 0xffffff00, 0xff90ee90, 0xff008000, 0xff0000ff, 0xff00ffff, 0xff000080};

namespace detail {

using Function = void (*)();
using Initialize = int (*)(const void* (*)(std::uint32_t));

struct Attributes {
    std::uint16_t version = 3, size = 48;
    std::uint32_t category = 0;
    std::int32_t color_type = 1;  // ARGB
    std::uint32_t color = 0;
    std::int32_t payload_type = 2, reserved = 0;  // 64-bit signed
    std::int64_t payload = 0;
    std::int32_t message_type = 3;  // registered string
    const void* message = nullptr;
};
static_assert(sizeof(Attributes) == 48, "the layout that tools expect");

// What a tool may attach to, by module (core, CUDA, OpenCL, CUDART, core2, sync): it writes its functions into these places.
inline constexpr unsigned MODULES = 7, MOST_FUNCTIONS = 16, CORE2 = 5;
inline constexpr unsigned FUNCTIONS[MODULES] = {0, 16, 9, 15, 7, 16, 7};
enum { PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };
inline Function functions[MODULES][MOST_FUNCTIONS];
inline Function* places[MODULES][MOST_FUNCTIONS + 1];

inline int module_functions(int module, Function*** table, unsigned* size) {
    if (module <= 0 || module >= int(MODULES)) return 0;
    for (unsigned i = 1; i < FUNCTIONS[module]; ++i) places[module][i] = &functions[module][i];  // entry 0 and the one behind the last stay null
    if (table) *table = places[module];
    if (size) *size = FUNCTIONS[module];
    return 1;
}

struct Callbacks {
    std::size_t size = sizeof(Callbacks);
    int (*get)(int, Function***, unsigned*) = module_functions;
};
struct Version {
    std::size_t size = sizeof(Version);
    std::uint32_t version = 3, reserved = 0;
    void (*set_injection_version)(std::uint32_t) = [](std::uint32_t) {};
};
inline Callbacks callbacks;
inline Version version;

inline const void* export_table(std::uint32_t id) { return id == 1 ? static_cast<const void*>(&callbacks) : id == 3 ? &version : nullptr; }

struct Tool {
    void* domain = nullptr;  // null: no tool listens
    std::atomic<const void*> messages[KINDS][MOST_LAYERS] = {};

    template <class Signature> static Signature function(int which) { return reinterpret_cast<Signature>(functions[CORE2][which]); }

    Tool() {
        auto start = reinterpret_cast<Initialize>(dlsym(RTLD_DEFAULT, "InitializeInjectionNvtx2Preinject"));
        const char* path = std::getenv("NVTX_INJECTION64_PATH");
        if (!start && path && *path) {
            if (void* library = dlopen(path, RTLD_LAZY)) start = reinterpret_cast<Initialize>(dlsym(library, "InitializeInjectionNvtx2"));
        }
        if (!start || !start(export_table)) return;
        if (!functions[CORE2][PUSH] || !functions[CORE2][POP] || !functions[CORE2][REGISTER_STRING] || !functions[CORE2][CREATE_DOMAIN]) return;
        domain = function<void* (*)(const char*)>(CREATE_DOMAIN)("apexk");
        if (domain && functions[CORE2][NAME_CATEGORY]) {
            for (int kind = 0; kind < KINDS; ++kind)
                function<void (*)(void*, std::uint32_t, const char*)>(NAME_CATEGORY)(domain, std::uint32_t(kind + 1), NAMES[kind]);
        }
    }

    const void* message(Kind kind, int layer) {
        auto& known = messages[kind][layer];
        if (const void* found = known.load(std::memory_order_acquire)) return found;
        char text[32];
        std::snprintf(text, sizeof text, "L%02d/%s", layer, NAMES[kind]);
        const void* made = function<const void* (*)(void*, const char*)>(REGISTER_STRING)(domain, text);
        known.store(made, std::memory_order_release);  // two threads may both register: either handle names the same words
        return made;
    }
};

inline Tool& tool() {
    static Tool one;
    return one;
}

}  // namespace detail

// Whether ranges reach a tool; looks for one at the first call.
inline bool active() { return detail::tool().domain != nullptr; }

inline void push(Kind kind, int layer, std::int64_t payload) {
    detail::Tool& tool = detail::tool();
    if (!tool.domain) return;
    detail::Attributes attributes;
    attributes.category = std::uint32_t(kind) + 1;
    attributes.color = COLORS[kind];
    attributes.payload = payload;
    attributes.message = tool.message(kind, layer < 0 ? 0 : layer < MOST_LAYERS ? layer : MOST_LAYERS - 1);
    detail::Tool::function<int (*)(void*, const detail::Attributes*)>(detail::PUSH)(tool.domain, &attributes);
}

inline void pop() {
    detail::Tool& tool = detail::tool();
    if (tool.domain) detail::Tool::function<int (*)(void*)>(detail::POP)(tool.domain);
}

// A range of the thread that makes it; the payload is what apexk/nvtx.py says for its kind (PAYLOADS).
class Range {
public:
    Range(Kind kind, int layer, std::int64_t payload) { push(kind, layer, payload); }
    ~Range() { pop(); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
};

}  // namespace apexk_nvtx
