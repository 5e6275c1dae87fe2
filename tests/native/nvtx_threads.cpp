// What a native channel and a native worker do, reduced to their ranges; for tests/test_nvtx.py.
#include <initializer_list>
#include <thread>

#include "apexk_nvtx.h"

extern "C" int run_native_threads() {
    using namespace apexk_nvtx;
    std::thread channel([] {
        for (int expert : {5, 300}) Range range(COPY_EXACT, 7, expert);
    });
    channel.join();
    std::thread worker([] {
        Range ffn(HOST_FFN, 7, 3);
        Range rows(HOST_ROWS, 7, 1ll << 40);
    });
    worker.join();
    return active();
}
