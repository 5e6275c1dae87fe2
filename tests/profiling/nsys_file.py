"""Builds nsys sqlite exports by the documented schema of two products, for tests; a column list a table, as documented."""

import sqlite3

GREEN = "greenContextId INTEGER, "
DDL = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, totalMemory INTEGER, smCount INTEGER, computeMajor INTEGER, computeMinor INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, " + GREEN
    + "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, " + GREEN
    + "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT",
}  # fmt: skip
LATER = {  # 2025.6.3 over 2024.6.2
    "CUPTI_ACTIVITY_KIND_KERNEL": ", graphId INTEGER, clusterX INTEGER, clusterY INTEGER, clusterZ INTEGER, clusterSchedulingPolicy INTEGER, maxPotentialClusterSize INTEGER, maxActiveClusters INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": ", copyCount INTEGER",
}
OLD, NOW, LATEST = "2023.1.1", "2024.6.2", "2025.6.3"


class NsysFile:
    """One process with the threads that are named at the calls; `globalTid` as in the documentation."""

    def __init__(self, path, version=NOW, pid=77):
        self.database, self.version, self.pid = sqlite3.connect(path), version, pid
        self.made, self._strings, self._calls = set(), {}, 0
        self.row("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value=version)
        self.row("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.16.1")
        self.row("TARGET_INFO_GPU", vmId=0, id=0, name="a GPU", totalMemory=1, smCount=1)

    def thread(self, number):
        return 1 << 56 | self.pid << 24 | number

    @property
    def process(self):
        return self.thread(0)

    def string(self, text):
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.row("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def row(self, table, **values):
        if table not in self.made:
            columns = DDL[table] + (LATER.get(table, "") if self.version == LATEST else "")
            if self.version == OLD:
                columns = columns.replace(GREEN, "")
            self.database.execute(f"CREATE TABLE {table} ({columns})")
            self.made.add(table)
        self.database.execute(f"INSERT INTO {table} ({','.join(values)}) VALUES ({','.join('?' * len(values))})", tuple(values.values()))

    def domain(self, name="apexk", number=1):
        self.row("NVTX_EVENTS", start=0, eventType=75, text=name, globalTid=self.thread(1), domainId=number)

    def range(self, text, start, end, thread, payload=None, *, registered=True, domain=1, end_thread=None, kind=59):
        words = {"textId": self.string(text)} if registered else {"text": text}
        self.row("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=self.thread(thread), domainId=domain, int64Value=payload,
                 endGlobalTid=end_thread and self.thread(end_thread), **words)  # fmt: skip

    def call(self, start, thread, name="cudaLaunchKernel", length=2, event_class=0):
        self._calls += 1
        self.row("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=start + length, eventClass=event_class, globalTid=self.thread(thread),
                 correlationId=self._calls, nameId=self.string(name), returnValue=0)  # fmt: skip
        return self._calls

    def kernel(self, start, end, correlation, stream=7, process=True):
        name = self.string("kernel")
        zero = dict.fromkeys(("deviceId", "registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory",
                              "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId"), 0)  # fmt: skip
        self.row("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, contextId=1, streamId=stream, correlationId=correlation,
                 globalPid=self.process if process else None, demangledName=name, shortName=name, **zero)  # fmt: skip

    def copy(self, start, end, correlation, size, kind=1, source=1, stream=20):
        self.row("CUPTI_ACTIVITY_KIND_MEMCPY", start=start, end=end, deviceId=0, contextId=1, streamId=stream, correlationId=correlation,
                 globalPid=self.process, bytes=size, copyKind=kind, srcKind=source, dstKind=2)  # fmt: skip

    def close(self):
        self.database.commit()
        self.database.close()
