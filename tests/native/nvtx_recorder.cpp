// An NVTX tool for tests: writes what it is told to the file that APEXK_NVTX_RECORD names, one line a call,
//     push <thread> <domain> <category> <message> <payload> <depth>      pop <thread> <domain> <depth>
// Loaded through NVTX_INJECTION64_PATH; numbers and layouts as in NVTX 3's nvtxDetail/nvtxTypes.h.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace {

struct Attributes {
    std::uint16_t version, size;
    std::uint32_t category;
    std::int32_t color_type;
    std::uint32_t color;
    std::int32_t payload_type, reserved;
    union { std::uint64_t u; std::int64_t i; double d; } payload;
    std::int32_t message_type;
    const void* message;
};

std::mutex lock;
std::FILE* out = nullptr;
std::map<std::uint32_t, std::string> categories[16];
struct Domain { std::string name; int index; };
thread_local std::map<const void*, int> depth;

long thread() { return syscall(SYS_gettid); }

int push(const Domain* domain, const Attributes* a) {
    std::lock_guard<std::mutex> guard(lock);
    const char* message = a->message_type == 3 ? static_cast<const std::string*>(a->message)->c_str()
                        : a->message_type == 1 ? static_cast<const char*>(a->message) : "?";
    const auto& names = categories[domain->index];
    const auto category = names.find(a->category);
    std::fprintf(out, "push %ld %s %s %s %s%lld %d\n", thread(), domain->name.c_str(), category == names.end() ? "?" : category->second.c_str(), message,
                 a->payload_type == 2 ? "" : "?", static_cast<long long>(a->payload.i), depth[domain]);
    return depth[domain]++;
}

int pop(const Domain* domain) {
    std::lock_guard<std::mutex> guard(lock);
    std::fprintf(out, "pop %ld %s %d\n", thread(), domain->name.c_str(), --depth[domain]);
    return depth[domain];
}

const void* register_string(const Domain*, const char* text) { return new std::string(text); }

const void* create_domain(const char* name) {
    std::lock_guard<std::mutex> guard(lock);
    static int made = 0;
    return new Domain{name, made++ & 15};
}

void name_category(const Domain* domain, std::uint32_t id, const char* name) {
    std::lock_guard<std::mutex> guard(lock);
    categories[domain->index][id] = name;
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(const void* (*get)(std::uint32_t)) {
    struct Callbacks { std::size_t size; int (*functions)(int, void***, unsigned*); };
    const auto* table = static_cast<const Callbacks*>(get(1));
    void** functions = nullptr;
    unsigned count = 0;
    if (!table || !table->functions(5, &functions, &count) || count < 15) return 0;
    if (!out) {
        const char* path = std::getenv("APEXK_NVTX_RECORD");
        out = path ? std::fopen(path, "w") : nullptr;
        if (!out) return 0;
        std::setvbuf(out, nullptr, _IOLBF, 1 << 16);
    }
    const auto set = [&](int which, void* function) { *static_cast<void**>(functions[which]) = function; };
    set(4, reinterpret_cast<void*>(push));
    set(5, reinterpret_cast<void*>(pop));
    set(8, reinterpret_cast<void*>(name_category));
    set(10, reinterpret_cast<void*>(register_string));
    set(12, reinterpret_cast<void*>(create_domain));
    return 1;
}
